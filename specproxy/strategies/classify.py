"""What kind of text a request asks for, told from its fields and its words alone."""

from __future__ import annotations

from specproxy.records import OutputForm, RequestFacts, TempBucket, Workload

__all__ = ["KINDS", "classify", "temp_bucket"]

KINDS: tuple[str, ...] = (
    "json_schema",
    "json",
    "tool_call",
    "code",
    "code_edit",
    "infill",
    "grounded",
    "translation",
    "math",
    "prose",
    "creative",
    "chat",
)


def classify(facts: RequestFacts) -> Workload:
    """The workload of a request."""
    if facts.infill:
        kind, signals = "infill", ("field:suffix",)
    elif facts.output in (OutputForm.JSON_SCHEMA, OutputForm.GRAMMAR):
        kind, signals = "json_schema", (f"field:{facts.output}",)
    elif facts.output is OutputForm.JSON_OBJECT:
        kind, signals = "json", ("field:json_object",)
    elif facts.tool_choice in ("required", "named"):
        kind, signals = "tool_call", (f"field:tool_choice={facts.tool_choice}",)
    else:
        kind, signals = "prose", ("fallback",)
    return Workload(kind, temp_bucket(facts.temperature), _flags(facts), signals)


def temp_bucket(temperature: float | None) -> TempBucket:
    """The bucket of a sampling temperature; not given counts as the servers' usual default, 0.8."""
    if temperature is None:
        return TempBucket.WARM
    if temperature <= 0:
        return TempBucket.GREEDY
    if temperature <= 0.5:
        return TempBucket.COOL
    return TempBucket.WARM if temperature < 1 else TempBucket.HOT


def _flags(facts: RequestFacts) -> frozenset[str]:
    present = {
        "logprobs": facts.logprobs,
        "images": facts.images > 0,
        "audio": facts.audio > 0,
        "many": facts.n > 1,
        "steering": bool(facts.steering),
        "thinking": facts.thinking is True,
    }
    return frozenset(name for name, on in present.items() if on)
