"""What the conformance run sends: curl and the official clients, as people use them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import anthropic
import ollama
import openai

from benchmarks.conformance_compare import Reply, parse

__all__ = ["Case", "curl_cases", "ollama_cases", "openai_cases"]

TEXT = "Name three colours."
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": TEXT}]
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "You are brief. Ünïcode: 日本語 🙂"},
    {"role": "user", "content": "Say hello."},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": 'And "quoted"\nlines?'},
]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]}
FUNCTION = {"name": "look_up", "description": "Looks a word up.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
GREEDY: dict[str, Any] = {"temperature": 0, "seed": 7}
LENGTH = 8  # tokens of an answer


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to do at a base URL, by one client."""

    client: str
    name: str
    run: Callable[[str], Reply]


# --- curl ----------------------------------------------------------------------------------------


def curl(base: str, method: str, path: str, body: bytes | None, flags: tuple[str, ...]) -> Reply:
    """One exchange by curl, with every byte that came back."""
    command = ["curl", "-sS", "-i", "--raw", "--path-as-is", "--max-time", "120", *flags]
    command += ["-I"] if method == "HEAD" else ["-X", method]
    if body is not None:
        command += ["-H", "Content-Type: application/json", "--data-binary", "@-"]
    done = subprocess.run([*command, base + path], input=body, capture_output=True, check=False, timeout=150)
    if done.returncode:
        return Reply(0, body=f"curl ended with {done.returncode}: {done.stderr.decode()}")
    head, _, rest = done.stdout.partition(b"\r\n\r\n")
    while head.startswith(b"HTTP/1.1 100"):
        head, _, rest = rest.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = tuple((name, value) for name, _, value in (line.partition(": ") for line in lines[1:]))
    kinds = {name.lower(): value for name, value in headers}
    if kinds.get("transfer-encoding") == "chunked" and method != "HEAD":
        rest = dechunk(rest)
    return Reply(int(lines[0].split(" ")[1]), headers, parse(rest, kinds.get("content-type", "")), rest)


def dechunk(data: bytes) -> bytes:
    """A chunked body without its framing."""
    whole = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size.split(b";")[0], 16)
        if length == 0:
            return whole
        whole, data = whole + data[:length], data[length + 2 :]
    return whole + b"[the last chunk is missing]"


Row = tuple[str, str, str, Any]  # name, method, path, body (an object, bytes, or None)


def shared_rows(model: str) -> list[Row]:
    """Routes that llama-server, the engine and Ollama all have."""
    chat = {"model": model, "messages": MESSAGES, "max_tokens": LENGTH, **GREEDY}
    old = {"model": model, "prompt": TEXT, "max_tokens": LENGTH, **GREEDY}
    message = {"model": model, "messages": MESSAGES, "max_tokens": LENGTH, "temperature": 0}
    response = {"model": model, "input": TEXT, "max_output_tokens": LENGTH, "temperature": 0}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    return [
        ("the root", "GET", "/", None),
        ("HEAD of the root", "HEAD", "/", None),
        ("models", "GET", "/v1/models", None),
        ("no such route", "GET", "/no/such/route", None),
        ("an encoded slash", "GET", "/v1/models/a%2Fb?x=%2F&y=1", None),
        ("the wrong method", "DELETE", "/v1/chat/completions", None),
        ("chat", "POST", "/v1/chat/completions", chat),
        ("chat, streamed", "POST", "/v1/chat/completions", {**chat, "stream": True}),
        (
            "chat, streamed with usage",
            "POST",
            "/v1/chat/completions",
            {**chat, "stream": True, "stream_options": {"include_usage": True}},
        ),
        ("a longer chat", "POST", "/v1/chat/completions", {**chat, "messages": TALK}),
        ("chat with a stop", "POST", "/v1/chat/completions", {**chat, "stop": ["e", "."]}),
        ("chat with a schema", "POST", "/v1/chat/completions", {**chat, "response_format": form}),
        ("chat with logprobs", "POST", "/v1/chat/completions", {**chat, "logprobs": True, "top_logprobs": 2}),
        ("chat with unknown fields", "POST", "/v1/chat/completions", {**chat, "x-unknown": [1, {"a": None}]}),
        ("chat with wrong types", "POST", "/v1/chat/completions", {**chat, "messages": 7}),
        ("chat without messages", "POST", "/v1/chat/completions", {"model": model}),
        ("broken JSON", "POST", "/v1/chat/completions", b'{"model": "x", "messages": ['),
        ("an empty body", "POST", "/v1/chat/completions", b""),
        ("a JSON list", "POST", "/v1/chat/completions", b"[]"),
        ("completion", "POST", "/v1/completions", old),
        ("completion, streamed", "POST", "/v1/completions", {**old, "stream": True}),
        ("response", "POST", "/v1/responses", response),
        ("response, streamed", "POST", "/v1/responses", {**response, "stream": True}),
        ("message", "POST", "/v1/messages", message),
        ("message, streamed", "POST", "/v1/messages", {**message, "stream": True}),
        ("a message with a system text", "POST", "/v1/messages", {**message, "system": "Be brief."}),
        ("embeddings that are not there", "POST", "/v1/embeddings", {"model": model, "input": TEXT}),
        ("a body of a megabyte", "POST", "/v1/embeddings", {"model": model, "input": "word " * 200_000}),
    ]


def llama_rows(model: str) -> list[Row]:
    """llama.cpp's own routes."""
    own = {"prompt": TEXT, "n_predict": LENGTH, "cache_prompt": True, **GREEDY}
    return [
        ("health", "GET", "/health", None),
        ("properties", "GET", "/props", None),
        ("metrics", "GET", "/metrics", None),
        ("adapters", "GET", "/lora-adapters", None),
        ("tokens", "POST", "/tokenize", {"content": "Ünïcode 日本語", "add_special": True}),
        ("tokens with pieces", "POST", "/tokenize", {"content": TEXT, "with_pieces": True}),
        ("text of tokens", "POST", "/detokenize", {"tokens": [1, 2, 3, 400]}),
        ("a prompt", "POST", "/apply-template", {"messages": TALK}),
        ("own completion", "POST", "/completion", own),
        ("own completion, streamed", "POST", "/completion", {**own, "stream": True}),
        ("completion with a grammar", "POST", "/completion", {**own, "grammar": 'root ::= "yes" | "no"'}),
        ("completion with a bad grammar", "POST", "/completion", {**own, "grammar": "root ::= ("}),
        ("completion with n_probs", "POST", "/completion", {**own, "n_probs": 2}),
        ("infilling", "POST", "/infill", {"input_prefix": "def a", "input_suffix": "b", **GREEDY}),
        ("a count", "POST", "/v1/messages/count_tokens", {"model": model, "messages": MESSAGES}),
        ("the short path", "POST", "/chat/completions", {"messages": MESSAGES, "max_tokens": 4, **GREEDY}),
    ]


def ollama_rows(model: str) -> list[Row]:
    """Ollama's own routes; no model is taken away."""
    options = {"temperature": 0, "seed": 7, "num_predict": LENGTH}
    chat = {"model": model, "messages": MESSAGES, "options": options}
    text = {"model": model, "prompt": TEXT, "options": options}
    absent = "sha256:" + "0" * 64
    return [
        ("version", "GET", "/api/version", None),
        ("HEAD of the version", "HEAD", "/api/version", None),
        ("tags", "GET", "/api/tags", None),
        ("HEAD of the tags", "HEAD", "/api/tags", None),
        ("loaded models", "GET", "/api/ps", None),
        ("a model", "POST", "/api/show", {"model": model}),
        ("a model that is not there", "POST", "/api/show", {"model": "absent"}),
        ("native chat, streamed", "POST", "/api/chat", chat),
        ("native chat", "POST", "/api/chat", {**chat, "stream": False}),
        ("a longer native chat", "POST", "/api/chat", {**chat, "messages": TALK, "stream": False}),
        ("native chat with a form", "POST", "/api/chat", {**chat, "format": SCHEMA, "stream": False}),
        ("native chat with json", "POST", "/api/chat", {**chat, "format": "json", "stream": False}),
        ("chat without messages, which loads", "POST", "/api/chat", {"model": model, "messages": []}),
        ("chat that keeps alive", "POST", "/api/chat", {**chat, "keep_alive": "5m", "stream": False}),
        ("a chat that thinks", "POST", "/api/chat", {**chat, "think": True, "stream": False}),
        ("chat with a model that is not there", "POST", "/api/chat", {**chat, "model": "absent"}),
        ("generate, streamed", "POST", "/api/generate", text),
        ("generate", "POST", "/api/generate", {**text, "stream": False}),
        ("generate raw", "POST", "/api/generate", {**text, "raw": True, "stream": False}),
        ("generate with a system text", "POST", "/api/generate", {**text, "system": "Be brief."}),
        ("generate with a suffix", "POST", "/api/generate", {**text, "suffix": "end", "stream": False}),
        ("generate without a prompt, which loads", "POST", "/api/generate", {"model": model}),
        ("broken JSON", "POST", "/api/generate", b"{"),
        ("native embeddings that are not there", "POST", "/api/embed", {"model": model, "input": TEXT}),
        ("old embeddings that are not there", "POST", "/api/embeddings", {"model": model, "prompt": TEXT}),
        ("HEAD of a blob that is not there", "HEAD", f"/api/blobs/{absent}", None),
        ("a blob that is not what it says", "POST", f"/api/blobs/{absent}", b"not it"),
        ("a copy of what is not there", "POST", "/api/copy", {"source": "absent", "destination": "b"}),
        ("taking away what is not there", "DELETE", "/api/delete", {"model": "absent"}),
        ("creating from nothing", "POST", "/api/create", {"model": "new"}),
    ]


def curl_cases(kind: str, model: str) -> list[Case]:
    """By curl: routes that all servers have, those of the server's kind, and odd ways to send a request."""
    rows = shared_rows(model) + (ollama_rows(model) if kind == "ollama" else llama_rows(model))
    cases = []
    for name, method, path, body in rows:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        cases.append(Case("curl", name, partial(_curl, method, path, data, ())))
    chat = {"model": model, "messages": MESSAGES, "max_tokens": LENGTH, **GREEDY}
    body = json.dumps(chat).encode()
    pretty = json.dumps(chat, indent=4, ensure_ascii=False).encode()
    odd: Iterable[tuple[str, bytes, tuple[str, ...]]] = (
        ("a body in chunks", body, ("-H", "Transfer-Encoding: chunked")),
        ("HTTP/1.0", body, ("--http1.0",)),
        ("a body that waits for leave", body, ("-H", "Expect: 100-continue")),
        ("an offer of HTTP/2", body, ("--http2",)),
        ("indented JSON", pretty, ()),
        ("an unknown content type", body, ("-H", "Content-Type: text/x-unknown")),
        ("compression that is offered", body, ("-H", "Accept-Encoding: gzip, br")),
        ("a cookie and a key", body, ("-H", "Cookie: a=b", "-H", "Authorization: Bearer none")),
    )
    path = "/v1/chat/completions"
    return cases + [Case("curl", name, partial(_curl, "POST", path, data, flags)) for name, data, flags in odd]


def _curl(method: str, path: str, body: bytes | None, flags: tuple[str, ...], base: str) -> Reply:
    return curl(base, method, path, body, flags)


# --- the official clients ------------------------------------------------------------------------


def _outcome(run: Callable[[], Any]) -> Reply:
    """What a client's call gives its caller: data, a list for a stream, or an error."""
    try:
        return Reply(200, body=_plain(run()))
    except (openai.APIStatusError, anthropic.APIStatusError) as error:
        return Reply(error.status_code, body=[type(error).__name__, str(error), error.body])
    except ollama.ResponseError as error:
        return Reply(error.status_code, body=[type(error).__name__, error.error])
    except (openai.APIConnectionError, anthropic.APIConnectionError, ConnectionError) as error:
        return Reply(0, body=[type(error).__name__, str(error)])
    except ValueError as error:  # the client does not take what the server said
        return Reply(200, body=[type(error).__name__, str(error)])


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def openai_cases(model: str) -> list[Case]:
    """The openai and the anthropic client."""
    chat: dict[str, Any] = {"model": model, "messages": MESSAGES, "max_tokens": LENGTH, **GREEDY}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    old: dict[str, Any] = {"model": model, "prompt": TEXT, "max_tokens": LENGTH, **GREEDY}
    response: dict[str, Any] = {"model": model, "input": TEXT, "max_output_tokens": LENGTH, "temperature": 0}
    calls: list[tuple[str, Callable[[Any], Any]]] = [
        ("models", lambda c: list(c.models.list())),
        ("a model", lambda c: c.models.retrieve(model)),
        ("chat", lambda c: c.chat.completions.create(**chat)),
        ("chat, streamed", lambda c: list(c.chat.completions.create(**chat, stream=True))),
        (
            "chat, streamed with usage",
            lambda c: list(
                c.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True})
            ),
        ),
        ("a longer chat", lambda c: c.chat.completions.create(**{**chat, "messages": TALK})),
        ("chat with a schema", lambda c: c.chat.completions.create(**chat, response_format=form)),
        ("chat with a tool", lambda c: c.chat.completions.create(**chat, tools=[TOOL])),
        ("chat with a stop", lambda c: c.chat.completions.create(**chat, stop=["e"])),
        ("chat with penalties", lambda c: c.chat.completions.create(**chat, frequency_penalty=0.5)),
        ("chat with logprobs", lambda c: c.chat.completions.create(**chat, logprobs=True, top_logprobs=2)),
        ("a wrong request", lambda c: c.chat.completions.create(**{**chat, "messages": [{"role": 7}]})),
        ("completion", lambda c: c.completions.create(**old)),
        ("completion, streamed", lambda c: list(c.completions.create(**old, stream=True))),
        ("response", lambda c: c.responses.create(**response)),
        ("response, streamed", lambda c: list(c.responses.create(**response, stream=True))),
        ("embeddings that are not there", lambda c: c.embeddings.create(model=model, input=TEXT)),
        (
            "headers of an answer",
            lambda c: c.chat.completions.with_raw_response.create(**chat).headers.get("content-type"),
        ),
    ]
    message: dict[str, Any] = {"model": model, "messages": MESSAGES, "max_tokens": LENGTH}
    message["extra_body"] = {"temperature": 0}
    tool = {"name": "look_up", "description": "Looks a word up.", "input_schema": SCHEMA}
    asked: list[tuple[str, Callable[[Any], Any]]] = [
        ("message", lambda c: c.messages.create(**message)),
        ("message, streamed", lambda c: list(c.messages.create(**message, stream=True))),
        ("message with a system text", lambda c: c.messages.create(**message, system="Be brief.")),
        ("message with a stop", lambda c: c.messages.create(**message, stop_sequences=["e"])),
        ("message with a tool", lambda c: c.messages.create(**message, tools=[tool])),
        ("a wrong message", lambda c: c.messages.create(**{**message, "messages": []})),
        ("a count", lambda c: c.messages.count_tokens(model=model, messages=MESSAGES)),
    ]
    return [
        *(Case("openai", name, partial(_openai, call)) for name, call in calls),
        *(Case("anthropic", name, partial(_anthropic, call)) for name, call in asked),
    ]


def _openai(call: Callable[[Any], Any], base: str) -> Reply:
    with openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=120) as client:
        return _outcome(lambda: call(client))


def _anthropic(call: Callable[[Any], Any], base: str) -> Reply:
    with anthropic.Anthropic(base_url=base, api_key="none", max_retries=0, timeout=120) as client:
        return _outcome(lambda: call(client))


def ollama_cases(model: str) -> list[Case]:
    """The ollama client."""
    options = {"temperature": 0, "seed": 7, "num_predict": LENGTH}
    chat: dict[str, Any] = {"model": model, "messages": MESSAGES, "options": options}
    text: dict[str, Any] = {"model": model, "prompt": TEXT, "options": options}
    calls: list[tuple[str, Callable[[Any], Any]]] = [
        ("models", lambda c: c.list()),
        ("loaded models", lambda c: c.ps()),
        ("a model", lambda c: c.show(model)),
        ("a model that is not there", lambda c: c.show("absent")),
        ("chat", lambda c: c.chat(**chat)),
        ("chat, streamed", lambda c: list(c.chat(**chat, stream=True))),
        ("a longer chat", lambda c: c.chat(**{**chat, "messages": TALK})),
        ("chat with a form", lambda c: c.chat(**chat, format=SCHEMA)),
        ("chat with a tool", lambda c: c.chat(**chat, tools=[TOOL])),
        ("chat with a model that is not there", lambda c: c.chat(**{**chat, "model": "absent"})),
        ("generate", lambda c: c.generate(**text)),
        ("generate, streamed", lambda c: list(c.generate(**text, stream=True))),
        ("generate raw", lambda c: c.generate(**text, raw=True)),
        ("generate with a system text", lambda c: c.generate(**text, system="Be brief.")),
        ("embeddings that are not there", lambda c: c.embed(model=model, input=TEXT)),
        ("a copy of what is not there", lambda c: c.copy("absent", "b")),
        ("taking away what is not there", lambda c: c.delete("absent")),
    ]
    return [Case("ollama", name, partial(_ollama, call)) for name, call in calls]


def _ollama(call: Callable[[Any], Any], base: str) -> Reply:
    with ollama.Client(host=base, timeout=120) as client:
        return _outcome(lambda: call(client))
