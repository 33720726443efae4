"""What is fuzzed of files and stored values: configuration, models and what comes with them, statistics.

See `fuzz_targets`, which these are added to.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from benchmarks.fuzz_targets import FOLDER, target
from specproxy.adapters.embedded.costs import StepCosts
from specproxy.adapters.embedded.grammar.schema import SchemaError, schema_to_gbnf
from specproxy.adapters.embedded.templates import ChatTemplate
from specproxy.adapters.gguf_facts import read_facts as read_gguf
from specproxy.adapters.go_template import GoTemplate, GoTemplateError
from specproxy.adapters.ollama import read_models, read_show
from specproxy.adapters.ollama_setup import ModelSetup, read_setup
from specproxy.config import load
from specproxy.errors import ConfigError, ModelFileError, RequestError, StoreError
from specproxy.proxy.board import Board, saved_s
from specproxy.proxy.metrics import render
from specproxy.proxy.quarantine import Quarantine
from specproxy.proxy.trials import read_findings
from specproxy.records import Observation
from specproxy.store.base import Event, from_json, to_json
from specproxy.store.redis import RedisStore
from specproxy.store.sqlite import open_store
from specproxy.strategies.engine_book import EngineBook
from specproxy.strategies.learner import Learner
from tests.proxy.samples import PLAIN, observation
from tests.support.random_model import write_random

TALK = (
    {"role": "system", "content": "S"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
)


@target(
    (Path(__file__).resolve().parent.parent / "examples" / "config.yaml").read_bytes(),
    b"limits: {body: 1GiB}\nupstream: [http://127.0.0.1:1]\n",
    b"log: {level: info}\nstrategies: 'plain,mtp:4'\n",
)
def _config(data: bytes) -> None:
    """A configuration file."""
    path = FOLDER / "config.yaml"
    path.write_bytes(data)
    try:
        load(path, environ={})
    except ConfigError:
        return


def _gguf_seed() -> bytes:
    path = FOLDER / "seed.gguf"
    write_random(path)
    return path.read_bytes()[:60_000]


@target(_gguf_seed(), b"GGUF\x03\0\0\0" + b"\0" * 16)
def _gguf(data: bytes) -> None:
    """A model file."""
    path = FOLDER / "model.gguf"
    path.unlink(missing_ok=True)  # never written over: it may be mapped
    path.write_bytes(data)
    try:
        read_gguf(path)
    except ModelFileError:
        return


def _learner_seed() -> bytes:
    learner = Learner()
    for i in range(5):
        learner.learn_one(replace(observation(), request_id=str(i), at=1000.0 + i))
    return json.dumps(learner.dump()).encode()


def _costs_seed() -> bytes:
    costs = StepCosts()
    costs.decoded(1, 0.01)
    costs.decoded(4, 0.02, context=100)
    costs.guessed("ngram", 3, 0.001)
    return json.dumps(costs.to_json()).encode()


def _board_seed() -> bytes:
    board = Board()
    board.observe(observation())
    return json.dumps(board.dump()).encode()


@target(
    _learner_seed(),
    _board_seed(),
    to_json(observation()).encode(),
    b'{"format":1,"sentences":[{"lane":"a","fingerprint":"f","at":1,"reason":"r"}]}',
    _costs_seed(),
    b'{"fp": "works"}',
)
def _state(data: bytes) -> None:
    """What a store gives back: the states of policy, board and quarantine, and an observation."""
    text = data.decode("utf-8", "replace")
    with contextlib.suppress(ValueError, KeyError, TypeError):  # every store makes them its own error
        seen = from_json(text)
        _use(seen)
    try:
        state = json.loads(text)
    except (ValueError, RecursionError):
        return
    board = Board()
    for part in (Learner(), board, Quarantine()):
        with contextlib.suppress(ValueError):
            part.load(state if isinstance(state, dict) else {})
    _show(board)
    for restore in (EngineBook().restore, StepCosts().restore):
        with contextlib.suppress(ValueError):
            restore(state)
    read_findings(state)


def _use(seen: Observation) -> None:
    """Learn from an observation, and show it."""
    learner, board = Learner(), Board()
    learner.learn_one(observation())
    learner.learn_one(seen)
    board.observe(seen)
    _show(board)
    board.recent()


def _show(board: Board) -> None:
    """What status and metrics show of a board."""
    saved_s(board.rows())
    render(board, ())
    for row in board.rows(by_kind=True):
        _ = row.cell.acceptance_interval, row.cell.tpt_interval, row.cell.total_quantile(0.9), row.cell.tok_s


def _sqlite_seed() -> bytes:
    path = FOLDER / "seed.db"
    store, _ = open_store(path)
    store.append([observation()])
    store.add_event(Event(1.0, "kind", "message"))
    store.save_policy("p", {"a": 1}, 1.0)
    store.close()
    return path.read_bytes()


@target(_sqlite_seed())
def _state_file(data: bytes) -> None:
    """The state file itself."""
    for old in FOLDER.glob("state.db*"):
        old.unlink()
    path = FOLDER / "state.db"
    path.write_bytes(data)
    store, _ = open_store(path)
    for read in (
        lambda: store.recent(5),
        lambda: store.events(5),
        lambda: store.load_policy("p"),
        store.summary,
        lambda: store.append([observation()]),
    ):
        with contextlib.suppress(StoreError):
            read()
    store.close()


@target(
    b'{{- range $i, $m := .Messages }}<{{ .Role }}>{{ $m.Content | printf "%s" }}{{ end }}',
    b"{{ if and .System (gt (len .Prompt) 3) }}{{ .System }}{{ else }}{{ .Prompt }}{{ end }} {{ .Response }}",
    b'{{ $x := "" }}{{ with index .Messages 0 }}{{ $x = .Content }}{{ break }}{{ end }}{{/* c */}}{{ $x }}',
)
def _go_template(data: bytes) -> None:
    """A TEMPLATE of Ollama's."""
    try:
        GoTemplate(data.decode("utf-8", "replace")).render(TALK)
    except GoTemplateError:
        return


@target(
    b"{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}{% endfor %}{{ bos_token }}",
    b"{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}{% set ns = namespace(x=1) %}{{ ns.x }}",
)
def _chat_template(data: bytes) -> None:
    """A chat template of a model file."""
    template = ChatTemplate(data.decode("utf-8", "replace")[:300])
    try:
        template.render(TALK)
    except RequestError:
        return


_SCHEMAS = (
    {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}}, "required": ["a"]},
    {"type": "array", "items": {"type": "string", "pattern": "^[a-c]{1,3}\\d$"}, "maxItems": 4},
    {"$defs": {"n": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]}}, "oneOf": [{"enum": [1, "x"]}]},
    {"type": "string", "format": "date-time", "minLength": 2}, {"type": "number", "multipleOf": 0.5},
)  # fmt: skip


@target(*(json.dumps(schema).encode() for schema in _SCHEMAS))
def _schema(data: bytes) -> None:
    """A JSON schema that a request brings, made into a grammar."""
    try:
        schema = orjson.loads(data)
    except ValueError:
        return
    with contextlib.suppress(SchemaError):
        schema_to_gbnf(schema)


_LAYERS = {
    "template": "{{ .Prompt }}",
    "system": "S",
    "params": {"stop": ["a"], "temperature": 0.5, "num_ctx": 2048},
    "messages": [{"role": "user", "content": "x"}],
    "config": {"renderer": "r", "model_format": "gguf"},
    "manifest": {
        "layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:0"}],
        "config": {"digest": "sha256:config"},
    },
    "tags": {"models": [{"name": "m:latest", "details": {"format": "gguf"}, "capabilities": ["x"]}]},
    "ps": {"models": [{"name": "m:latest", "context_length": 4096}]},
    "show": {
        "modelfile": 'FROM /m\nTEMPLATE """x"""\nPARAMETER draft_num_predict 3\nMESSAGE user hi\nDRAFT /d',
        "model_info": {"general.architecture": "llama", "llama.nextn_predict_layers": 1},
        "capabilities": ["completion"],
    },
}  # fmt: skip


@target(json.dumps(_LAYERS).encode())
def _modelfile(data: bytes) -> None:
    """What Ollama keeps and says of a model: manifest, layers of its Modelfile, /api/show, and our own copy."""
    try:
        given = json.loads(data)
    except (ValueError, RecursionError):
        return
    if not isinstance(given, dict):
        return
    _write_store(given)
    with contextlib.suppress(ConfigError):
        read_setup("m", [FOLDER / "ollama"])
    path = FOLDER / "setup.json"
    path.write_bytes(data)
    with contextlib.suppress(ConfigError):
        ModelSetup.load(path)
    for model in read_models(given.get("tags"), given.get("ps")):
        read_show(model, given.get("show"))


def _write_store(given: Mapping[str, Any]) -> None:
    """An Ollama store with these layers under the name ``m``."""
    blobs = FOLDER / "ollama" / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    (blobs / "sha256-0").write_bytes(b"GGUF")
    manifest = given.get("manifest")
    layers = manifest.get("layers") if isinstance(manifest, dict) else None
    if isinstance(layers, list):
        kinds = ("template", "system", "params", "messages")
        layers += [{"mediaType": f"x.{kind}", "digest": f"sha256:{kind}"} for kind in kinds]
    for kind in ("template", "system", "params", "messages", "config"):
        value = given.get(kind)
        text = value if isinstance(value, str) else json.dumps(value)
        (blobs / f"sha256-{kind}").write_text(text, encoding="utf-8", errors="replace")
    file = FOLDER / "ollama" / "manifests" / "registry.ollama.ai" / "library" / "m" / "latest"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(manifest), encoding="utf-8")


class _Answers:
    """A Redis that answers every command with the same things."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._entries = state["entries"]
        self._hash = state["hash"]
        self._text = state["text"]

    def xrange(self, *_: Any, **__: Any) -> Any:
        entries, self._entries = self._entries, []
        return entries

    def xrevrange(self, *_: Any, **given: Any) -> Any:
        return self._entries if given.get("max", "+") == "+" else []

    def hget(self, *_: Any) -> Any:
        return self._text

    def hgetall(self, *_: Any) -> Any:
        return self._hash

    def eval(self, *_: Any) -> None:
        """Scripts only write."""

    def pipeline(self, **_: Any) -> _Answers:
        return self

    def execute(self) -> list[Any]:
        return [self._hash]

    def __enter__(self) -> _Answers:
        return self

    def __exit__(self, *_: object) -> None:
        return None


def _redis_seed() -> bytes:
    ward = Quarantine(lambda: 1.0)
    ward.put(PLAIN, "r")
    entries = [
        [
            "1-0",
            {"o": to_json(observation()), "p": "x", "e": json.dumps({"at": 1, "kind": "k", "message": "m"})},
        ]
    ]
    return json.dumps(
        {"entries": entries, "hash": ward.entries(), "text": '{"last": "1-0", "state": {}}'}
    ).encode()


def _as_answers(given: Any) -> dict[str, Any]:
    """A Redis has texts alone, in lists and hashes of the shape that was asked for."""
    entries = [(str(i), {str(k): _text(v) for k, v in fields.items()}) for i, fields in given["entries"]]
    return {
        "entries": entries,
        "hash": {str(k): _text(v) for k, v in given["hash"].items()},
        "text": _text(given["text"]),
    }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@target(_redis_seed())
def _redis(data: bytes) -> None:
    """What a shared Redis gives back. Keys and values are text there, whatever was written."""
    try:
        answers = _Answers(_as_answers(json.loads(data)))
    except (ValueError, RecursionError, TypeError, AttributeError, KeyError):
        return
    store = RedisStore("redis://127.0.0.1:1/0")
    store._db = answers
    found: dict[str, str] = {}
    with contextlib.suppress(StoreError):
        found = store.sync("quarantine", {})
    Quarantine().replace(found)
    for read in (
        lambda: store.recent(5),
        lambda: store.events(5),
        lambda: store.load_policy("p"),
        lambda: store.after("0-0"),
    ):
        with contextlib.suppress(StoreError):
            read()
