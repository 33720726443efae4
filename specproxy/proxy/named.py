"""Requests about a model that have it write nothing: embeddings, ranks, tokens, and what it is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote

import orjson

from specproxy.adapters.base import Backend
from specproxy.proxy.router import Router
from specproxy.proxy.splice import splice
from specproxy.records import Health, Lane

__all__ = ["Question", "asks_about_a_model", "home", "names_matter", "read_question"]

# By the end of the path, as routes that generate are told. What changes a model (pull, copy, delete) is none of
# these: it is about the very name that stands there.
_ROUTES = (
    "/embeddings", "/embedding", "/api/embed", "/rerank", "/reranking", "/tokenize", "/detokenize",
    "/apply-template", "/messages/count_tokens", "/api/show",
)  # fmt: skip
_CARD = re.compile(r"(.*/v1/models/)([^?]+)(.*)")


@dataclass(frozen=True, slots=True)
class Question:
    """A request about the model `name`. `key` is where its reply has that name."""

    target: str
    body: bytes
    name: str
    key: str
    _in_body: str = ""  # the field that names it; empty where the path does

    def about(self, model: str) -> Question:
        """The same question about a model of another name; no other byte of it changes."""
        if self._in_body:
            body = splice(self.body, model=model, key=self._in_body)
            return Question(self.target, body, model, self.key, self._in_body)
        found = _CARD.fullmatch(self.target)
        assert found is not None, "that is where the name was found"
        target = found[1] + quote(model, safe=":") + found[3]
        return Question(target, self.body, model, self.key)


def asks_about_a_model(method: str, target: str) -> bool:
    """Whether a request is about one model, which its path or its body names."""
    if method == "POST":
        return target.partition("?")[0].endswith(_ROUTES)
    return method in ("GET", "HEAD") and _CARD.fullmatch(target) is not None


def read_question(method: str, target: str, body: bytes) -> Question | None:
    """The model that a request asks about; None where it names none."""
    if not asks_about_a_model(method, target):
        return None
    if method != "POST":
        found = _CARD.fullmatch(target)
        return Question(target, body, unquote(found[2]), "id") if found else None
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    fields = data if isinstance(data, dict) else {}
    for field in ("model", "name"):  # the latter is Ollama's old one
        if isinstance(name := fields.get(field), str) and name:
            return Question(target, body, name, "model", field)
    return None


def names_matter(router: Router) -> bool:
    """Whether a model's name bears on where a question goes, or on how it is put there."""
    return router.has_aliases or len(router.backends) > 1 or any(s.lane.upstream_model for s in router.lanes())


def home(router: Router, model: str) -> tuple[Backend, Lane, str]:
    """Where a question about a model goes, and how the model is called there.

    That is where requests go that are not routed, unless another server alone has the model.

    Raises:
        LaneUnavailable: there is no backend.
    """
    backend, lane = router.default()
    meant = router.meant(model) or model
    named = [status for status in router.lanes() if meant in status.lane.models]
    here = [status for status in named if status.lane.backend == backend.name]
    ready = [status for status in here or named if status.health is Health.READY]
    if not ready or not (here or lane.models):
        return backend, lane, meant
    found = min(ready, key=lambda status: not status.lane.strategy.is_plain).lane
    owner = next(one for one in router.backends if one.name == found.backend)
    return owner, found, found.upstream_model or meant
