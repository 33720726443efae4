"""What Ollama requests have in common: the model's name, `options` and `keep_alive`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specproxy.adapters.embedded.body import Fields
from specproxy.adapters.embedded.params import limit, sampling
from specproxy.adapters.embedded.service import Service
from specproxy.adapters.embedded.types import Sampling
from specproxy.errors import RequestError

__all__ = ["check_model", "options", "unload_wanted"]

# Ollama's defaults (0.33) where they differ from llama-server's
DEFAULTS: Mapping[str, Any] = {"top_p": 0.9, "min_p": 0.0}
# Sampling options of older versions, which would change the text
REFUSED: Mapping[str, tuple[Any, ...]] = {"tfs_z": (1,), "penalize_newline": (True,)}


def check_model(service: Service, body: Fields) -> None:
    """Let only the loaded model's names through.

    Raises:
        RequestError: the request names another model (404).
    """
    name = body.text("model") or body.text("name")
    if not name:
        raise body.wrong("model", "is required")
    if name.removesuffix(":latest") not in {known.removesuffix(":latest") for known in service.names}:
        raise RequestError(f"model '{name}' not found", status=404)


def options(body: Fields, vocab: int, own: Mapping[str, Any] | None = None) -> tuple[Sampling, int | None]:
    """Sampling and the longest reply from `options`. Runner options (num_ctx, num_gpu, …) change nothing here.
    `own` are the model's parameters in Ollama, which stand where a request says nothing.

    Raises:
        FieldError: an option is of the wrong type or out of range, or is not supported.
    """
    asked = body.object("options") or Fields({}, "options")
    asked.refuse(REFUSED)
    given = Fields({**(own or {}), **{k: v for k, v in asked.data.items() if v is not None}}, "options")
    merged = Fields({**DEFAULTS, **given.data}, "options")
    tokens = given.integer("num_predict")
    return (
        sampling(merged, vocab, logprobs=None, grammar=None),
        None if tokens is None or tokens < 0 else limit(given, "num_predict"),
    )


def unload_wanted(body: Fields) -> bool:
    """Whether `keep_alive` is 0, as a number or a duration: unload after this request."""
    value = body.get("keep_alive")
    if isinstance(value, str):
        return value.strip("0.") in ("", "s", "m", "h", "ms") and value[:1] == "0"
    return value == 0 and not isinstance(value, bool)
