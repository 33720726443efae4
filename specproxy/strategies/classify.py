"""What kind of text a request asks for, told from its fields and its words alone.

Fields decide first: a schema, a grammar, a demanded tool call, a gap to fill. Then the words of the last user
turn do, by rules in a fixed order of which the first that applies wins; a turn without a cue of its own falls
back on the system prompt and on the turns before. Sampling parameters give the temperature bucket and nothing
else.

Tools that are merely offered (`tool_choice` auto) mean little, because agents and chat programs offer them
with every request. They make it a tool call if the conversation is in the middle of calling tools (its last
turn is a tool's result), if the turn asks for something that needs a tool (live data, an action, a change to
code that is not in the request), or if the system prompt makes the model an agent and the turn is not one that
words alone can answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from specproxy.records import Dialect, OutputForm, RequestFacts, TempBucket, Turn, Workload
from specproxy.strategies.text_features import Reading, read

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

MATERIAL = 250  # characters beside the instruction from which on there is something to work on
DOCUMENT = 600  # characters of an earlier turn that make it a document to ask about
FEW_WORDS = 12  # without a cue that many words are talk
FEW_CHARS = 40  # the same for scripts whose words cannot be counted
FOLLOW_UP_WORDS = 25  # a longer turn says itself what it wants
FOLLOW_UP_TURNS = 3  # earlier turns that a short one may go on with
OPENING = 60  # characters in which a colon ends the instruction
SHORT_PROBLEM = 600  # characters; in longer texts numbers are facts rather than a problem
SHORT_SYSTEM = 800  # characters; longer system prompts name every kind of task
LOOK_BACK = 12  # turns

SYSTEM_EDGE = 4000  # characters of a system prompt in which an agent is told what it is
AGENT_TOOLS = 3  # an agent that works on files has at least so many tools

_RAW = frozenset({Dialect.OPENAI_COMPLETIONS, Dialect.LLAMACPP})
_AGENT = (
    "repository",
    "codebase",
    "workspace",
    "filesystem",
    "file system",
    "terminal",
    "software eng",
    "coding agent",
)

_NO_FLAGS: frozenset[str] = frozenset()

Verdict = tuple[str, str]  # kind, signal


class _Talk(NamedTuple):
    """The conversation as the rules see it."""

    facts: RequestFacts
    ask: Reading
    system: Reading | None
    earlier: Sequence[Turn]  # before the ask, without system turns, newest first
    agent: bool = False  # the system prompt makes the model an agent that works on files

    def earlier_code(self) -> bool:
        """Whether an earlier turn holds fenced code."""
        return any("```" in turn.text for turn in self.earlier)

    def document(self) -> bool:
        """Whether an earlier turn or the system prompt holds a document to ask about."""
        if self.system is not None and self.system.chars >= DOCUMENT and self.system.has("source", "extract"):
            return True
        return any(turn.role == "user" and len(turn.text) >= DOCUMENT for turn in self.earlier)


_Rule = Callable[[_Talk], "Verdict | None"]


def classify(facts: RequestFacts) -> Workload:
    """The workload of a request. Pure; takes well under a millisecond, however long the prompt is."""
    kind, signal = _by_fields(facts) or _by_content(facts)
    return Workload(kind, temp_bucket(facts.temperature), _flags(facts), (signal,))


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
    if not (facts.logprobs or facts.images or facts.audio or facts.n > 1 or facts.steering or facts.thinking):
        return _NO_FLAGS
    present = {
        "logprobs": facts.logprobs,
        "images": facts.images > 0,
        "audio": facts.audio > 0,
        "many": facts.n > 1,
        "steering": bool(facts.steering),
        "thinking": facts.thinking is True,
    }
    return frozenset(name for name, on in present.items() if on)


# --- fields --------------------------------------------------------------------------------------


def _by_fields(facts: RequestFacts) -> Verdict | None:
    if facts.infill:
        return "infill", "field:suffix"
    if facts.output in (OutputForm.JSON_SCHEMA, OutputForm.GRAMMAR):
        return "json_schema", f"field:{facts.output}"
    if facts.output is OutputForm.JSON_OBJECT:
        return "json", f"field:{facts.output}"
    if facts.tool_choice in ("required", "named"):
        return "tool_call", f"field:tool_choice={facts.tool_choice}"
    if facts.turns and facts.turns[-1].role == "tool" and facts.tools and facts.tool_choice == "auto":
        return "tool_call", "turns:tool result"
    return None


# --- content -------------------------------------------------------------------------------------


def _by_content(facts: RequestFacts) -> Verdict:
    talk = _talk(facts)
    verdict = _by_rules(talk, _RULES) or _follow_up(talk) or _plain(talk)
    if facts.tools and facts.tool_choice == "auto":
        return _needs_tool(talk, verdict[0]) or verdict
    return verdict


def _talk(facts: RequestFacts) -> _Talk:
    recent = facts.turns[-LOOK_BACK:]
    last = len(recent) - 1
    while last >= 0 and recent[last].role != "user":
        last -= 1
    ask = recent[last].text if recent else ""  # the very last turn where none is the user's
    system = next((turn.text for turn in facts.turns[:LOOK_BACK] if turn.role == "system"), None)
    before = [turn for turn in reversed(recent[: max(last, 0)]) if turn.role != "system"]
    return _Talk(facts, read(ask), read(system) if system else None, before, _is_agent(facts, system))


def _is_agent(facts: RequestFacts, system: str | None) -> bool:
    if system is None or facts.tools < AGENT_TOOLS:
        return False
    opening = system[:SYSTEM_EDGE].lower()
    return any(word in opening for word in _AGENT)


def _by_rules(talk: _Talk, rules: Sequence[_Rule]) -> Verdict | None:
    for rule in rules:
        if verdict := rule(talk):
            return verdict
    return None


def _infill(talk: _Talk) -> Verdict | None:
    return ("infill", "text:gap marks") if talk.ask.gap else None


def _given_code(talk: _Talk) -> Verdict | None:
    """Code is in the turn: it is to be changed, unless it is to be explained or to be gone on with."""
    ask = talk.ask
    if not ask.has_code:
        return None
    if ask.has("edit"):
        return "code_edit", "text:code and an edit verb"
    if ask.has("explain", "summarise") and not ask.has("edit_of_code"):
        return "prose", "text:code to explain"
    goes_on = talk.facts.dialect in _RAW and len(talk.facts.turns) == 1  # no template: the model just goes on
    if goes_on or ("create" in ask.lead and ask.has("code")):
        return "code", "text:code to go on from"
    return "code_edit", "text:code"


def _code_follow_up(talk: _Talk) -> Verdict | None:
    """A change to code that an earlier turn holds: an edit verb, or a technical word and nothing else."""
    ask = talk.ask
    if ask.words > FOLLOW_UP_WORDS or not talk.earlier_code():
        return None
    technical = ask.has("programming_language", "tech") and not ask.asks
    if ask.has("edit", "edit_of_code") or (technical and not ask.has("create", "explain")):
        return "code_edit", "turns:code before, a change now"
    return None


def _task_on_material(talk: _Talk) -> Verdict | None:
    """Cues at the edges of a long text: words of the material itself must not decide."""
    ask = talk.ask
    if ask.material >= MATERIAL and ask.edge_asks and not ask.has("programming_language"):
        return "grounded", "text:a question on long material"
    if "summarise" in ask.lead and ask.chars >= MATERIAL:
        return "grounded", "text:summarise what follows"
    return None


def _asks_for_json(talk: _Talk) -> Verdict | None:
    """JSON that is to come out; code that deals with JSON names the code first."""
    if talk.ask.before("json", "programming_language", "code"):
        return "json", "words:json"
    return None


def _translation(talk: _Talk) -> Verdict | None:
    ask = talk.ask
    if ask.has("programming_language"):
        return None
    if ask.has("translate"):
        return "translation", "words:translate"
    if ask.pair or (ask.has("language") and ask.has("translation")):
        return "translation", "words:translation and a language"
    if not ask.has("language") or ask.has("explain", "prose_form", "creative_form", "summarise"):
        return None
    opening = ask.instruction[:OPENING]
    from_to = ask.counts["language"] >= 2 or any(word in opening for word in (" in ", "into ", " to "))
    if ask.has("carry_over") or ask.quotes or (from_to and ":" in opening):
        return "translation", "words:a language to say it in"
    return None


def _code(talk: _Talk) -> Verdict | None:
    """Code that is to be written; a letter about code or a question about a language is none."""
    ask = talk.ask
    if ask.has("explain", "summarise") and not ask.has("create"):
        return None
    how = ask.first.get("how_to") == 0
    at_once = how or bool(ask.lead & {"create", "want"})
    asks_about = ask.first.get("question") == 0 and not how and not ask.has("code")
    if ask.before("programming_language", "prose_form", "creative_form") and not asks_about:
        return "code", "words:a programming language"
    if (at_once or ask.has("create")) and ask.before("code", "prose_form", "creative_form"):
        return "code", "words:write code"
    if at_once and ask.before("tech", "prose_form", "creative_form", "fancy"):
        return "code", "words:write something technical"
    return None


def _grounded(talk: _Talk) -> Verdict | None:
    ask = talk.ask
    if ask.material >= MATERIAL or ask.chars >= DOCUMENT:
        if ask.has("summarise"):
            return "grounded", "text:material to summarise"
        if ask.has("source", "extract"):
            return "grounded", "text:material and a task on it"
    if talk.document() and (ask.asks or ask.has("summarise", "extract", "source")):
        return "grounded", "turns:a question on a document"
    return None


def _math(talk: _Talk) -> Verdict | None:
    ask = talk.ask
    if ask.material >= MATERIAL or (ask.has("create", "want") and ask.has("creative_form", "prose_form")):
        return None
    if ask.formula and (ask.numbers or ask.has("math")):
        return "math", "text:a formula"
    if ask.has("math") and (ask.numbers or ask.has("number_word")):
        return "math", "words:math with numbers"
    amounts = ask.numbers + ask.counts.get("number_word", 0)
    units = ask.measures or ask.has("unit")
    if ask.has("quantity") and (amounts >= 2 or (ask.numbers and units)):
        return "math", "words:a quantity with numbers"
    if ask.numbers >= 2 and units and ask.asks and ask.chars <= SHORT_PROBLEM:
        return "math", "text:a question with numbers and units"
    if ask.measures and "edit" in ask.lead and ask.chars <= SHORT_PROBLEM:
        return "math", "text:units to convert"
    return None


def _creative(talk: _Talk) -> Verdict | None:
    """A creative form that is asked for; a question about a song is none."""
    ask = talk.ask
    asks_about = ask.edge_asks and ask.first.get("question") == 0 and not ask.has("create")
    if ask.has("creative_form") and not asks_about:
        return "creative", "words:a creative form"
    if ask.has("fancy") and (ask.has("create", "want", "explain") or ask.first.get("you") == 0):
        return "creative", "words:something fanciful"
    return None


def _continued(talk: _Talk) -> Verdict | None:
    """A short turn that says to go on with what an earlier turn asked for."""
    return _follow_up(talk) if talk.ask.has("continue") else None


def _material(talk: _Talk) -> Verdict | None:
    """A long text with a short task: whatever the task is, the answer draws on the text."""
    ask = talk.ask
    if ask.material >= MATERIAL and not ask.has("prose_form"):
        return "grounded", "text:long material"
    return None


def _from_system(talk: _Talk) -> Verdict | None:
    """What a short system prompt makes of every turn."""
    if talk.system is None or talk.system.chars > SHORT_SYSTEM:
        return None
    verdict = _by_rules(_Talk(talk.facts, talk.system, None, ()), _SYSTEM_RULES)
    return (verdict[0], f"system {verdict[1]}") if verdict else None


def _prose(talk: _Talk) -> Verdict | None:
    ask = talk.ask
    return ("prose", "words:explain or write") if ask.has("explain", "prose_form", "create", "want") else None


def _chat(talk: _Talk) -> Verdict | None:
    ask = talk.ask
    if ask.words <= FEW_WORDS and (ask.addresses or ask.has("small_talk")):
        return "chat", "words:small talk"
    if ask.words <= FEW_WORDS and ask.states and not ask.asks:
        return "chat", "text:a short statement"
    if ask.words <= FEW_WORDS // 2 and ask.has("you"):
        return "chat", "text:a few words to the other"
    return None


_RULES: tuple[_Rule, ...] = (
    _infill,
    _given_code,
    _code_follow_up,
    _asks_for_json,
    _task_on_material,
    _translation,
    _code,
    _grounded,
    _math,
    _creative,
    _continued,
    _material,
    _from_system,
    _prose,
    _chat,
)
_SYSTEM_RULES: tuple[_Rule, ...] = (_asks_for_json, _translation)


def _follow_up(talk: _Talk) -> Verdict | None:
    """What the newest earlier user turn that has a cue asked for, if this turn is short; of code, an edit."""
    if talk.ask.words > FOLLOW_UP_WORDS:
        return None
    if talk.earlier_code():
        return "code_edit", "turns:code before"
    asked = [turn for turn in talk.earlier if turn.role == "user"][:FOLLOW_UP_TURNS]
    for turn in asked:
        verdict = _by_rules(_Talk(talk.facts, read(turn.text), None, ()), _RULES)
        if verdict and verdict[0] != "chat":
            return verdict[0], f"earlier {verdict[1]}"
    return None


def _plain(talk: _Talk) -> Verdict:
    """No cue at all: very few words are talk, more are a question or a task in prose."""
    if talk.ask.words <= FEW_WORDS // 4 and talk.ask.chars <= FEW_CHARS and not talk.ask.asks:
        return "chat", "text:a few words"
    return "prose", "text:no cue"


def _needs_tool(talk: _Talk, kind: str) -> Verdict | None:
    """Whether tools that are merely offered will be called."""
    ask = talk.ask
    if kind in ("creative", "translation", "grounded", "math") or ask.has("small_talk"):
        return None
    if ask.has("live") or "action" in ask.lead or (talk.agent and ask.has("action")):
        return "tool_call", "words:needs a tool"
    if not ask.has_code and ("edit" in ask.lead or (talk.agent and ask.has("edit"))):
        return "tool_call", "words:an edit of what is not there"
    if talk.agent and not ask.has_code:
        return "tool_call", "system:an agent"
    return None
