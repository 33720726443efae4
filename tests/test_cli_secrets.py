"""No command, answer, log line or file of a running proxy holds a secret: all of them are searched."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from specproxy.store.redis import START, RedisStore
from tests.support.command import clean_env, run, started
from tests.support.ports import free_port
from tests.support.redis import running_redis
from tests.support.server import MODEL, openai_like
from tests.support.upstream import Received

pytestmark = pytest.mark.timeout(90)  # processes of a busy machine take their time

TOKEN, KEY, PASSWORD, CLIENT = (f"secret-{name}-7731" for name in ("token", "key", "password", "client"))
SECRETS = (TOKEN, KEY, PASSWORD, CLIENT)
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
LOOKS = (  # at {url} is the proxy, at {upstream} the server behind it
    "status --json --all --url {url}",
    "top --once --url {url}",
    "report --json --url {url}",
    "report --markdown {path}/report.md --url {url}",
    "explain {path}/request.json --url {url}",
    "quarantine list --url {url}",
    "doctor --upstream {upstream}",
    "doctor --upstream {upstream} --json",
    "config show",
    "config check",
    "logs",
)
SHARED_LOOKS = ("status --url {url}", "report --url {url}", "config show", "start --port {port}")
OTHER = "other-model"


@contextmanager
def servers(seen: dict[str, list[Received]]) -> Iterator[dict[str, str]]:
    """Upstreams in a thread, since commands block: by model their URLs, and in `seen` their requests."""
    loop, urls, ready = asyncio.new_event_loop(), dict[str, str](), threading.Event()

    async def serve() -> None:
        async with (
            openai_like(model=MODEL, seen=seen.setdefault(MODEL, [])) as one,
            openai_like(model=OTHER, seen=seen.setdefault(OTHER, [])) as other,
        ):
            urls.update({MODEL: one.url, OTHER: other.url})
            ready.set()
            await stop.wait()

    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    ready.wait()
    try:
        yield urls
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def asked(url: str, path: str, body: object = None, **headers: str) -> str:
    """Head and body of the answer, whatever its status."""
    data = None if body is None else json.dumps(body).encode()
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url + path, data, given)
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return f"{reply.headers} {reply.read().decode()}"
    except urllib.error.HTTPError as error:
        return f"{error.headers} {error.read().decode()}"


def answers(url: str) -> Iterator[str]:
    """What the proxy says, where it serves and where it refuses."""
    ours = {"X_Specproxy_Token": TOKEN, "Authorization": f"Bearer {CLIENT}"}
    yield asked(url, "/v1/chat/completions", CHAT, **ours)
    yield asked(url, "/v1/chat/completions", CHAT, **ours, X_Specproxy_Strategy="none")
    yield asked(url, "/v1/chat/completions", CHAT | {"model": "away"}, **ours)
    yield asked(url, "/v1/chat/completions", CHAT | {"model": OTHER}, **ours)
    yield asked(url, "/v1/chat/completions", CHAT | {"model": OTHER}, Authorization=f"Bearer {TOKEN}")
    yield asked(url, "/v1/chat/completions", CHAT, Authorization=f"Bearer {CLIENT}")
    yield asked(url, "/v1/models", **ours)
    for page in ("", "api/status?all=1", "api/recent", "metrics", "none"):
        yield asked(url, f"/specproxy/{page}", **ours)
    yield asked(url, "/specproxy/api/lift", {"lane": "none"}, **ours)
    yield asked(url, "/specproxy/api/explain", CHAT, **ours)


@pytest.mark.parametrize(
    "store",
    [
        "",
        "away",
        pytest.param("there", marks=pytest.mark.redis),
        pytest.param("refused", marks=pytest.mark.redis),
    ],
)
def test_no_output_holds_a_secret(tmp_path: Path, store: str) -> None:
    """Our token, an upstream's key, a store's password and a client's key: all set or sent, none shown.

    And each went where it belongs: our token to no upstream, a configured key to its own upstream alone and in
    place of the client's, the client's to where no key is configured.
    """
    seen: dict[str, list[Received]] = {}
    with ExitStack() as stack:
        urls = stack.enter_context(servers(seen))
        env = clean_env(tmp_path) | {"SPECPROXY_TOKEN": TOKEN, "UPSTREAM_KEY": KEY}
        if store == "away":  # which errors tell of
            env["SPECPROXY_STORE"] = f"redis://:{PASSWORD}@127.0.0.1:{free_port()}/0"
        elif store:
            (tmp_path / "redis").mkdir()
            password = PASSWORD if store == "there" else "another"
            redis = stack.enter_context(running_redis(str(tmp_path / "redis"), password))
            env["SPECPROXY_STORE"] = redis.url.replace("another", PASSWORD)
        configure(tmp_path, urls)
        said = everything_said(tmp_path, env, urls[MODEL], LOOKS if not store else SHARED_LOOKS)
        if store == "there":  # the password was of use
            kept = RedisStore(redis.url).after(START)
            assert 200 in {entry.seen.status for entry in kept if entry.seen.target == MODEL}
    if store in ("away", "refused"):
        assert "learning alone until the shared store is back" in said["log"]
    for file in (path for path in tmp_path.rglob("*") if path.is_file()):  # those of the Redis too
        said[file.name] = file.read_bytes().decode("latin-1")
    assert "four words of text" in said["answer 0"]
    assert [(name, secret) for name, text in said.items() for secret in SECRETS if secret in text] == []
    assert given_to(seen[MODEL]) == {(f"Bearer {KEY}",)}
    assert given_to(seen[OTHER]) == {(), (f"Bearer {CLIENT}",)}
    for request in seen[MODEL] + seen[OTHER]:
        assert TOKEN.encode() not in request.head + request.body
        assert not request.values(b"x-specproxy-token")


def given_to(requests: list[Received]) -> set[tuple[str, ...]]:
    """All that came as Authorization with requests of the proxy; `doctor` looks too, without any key."""
    return {
        tuple(value.decode() for value in request.values(b"authorization"))
        for request in requests
        if request.values(b"authorization") or b"/chat/" in request.request_line
    }


def configure(place: Path, urls: dict[str, str]) -> None:
    """Write settings with a keyed server, one without a key, and one that is away."""
    config = place / "config" / "specproxy" / "config.yaml"
    config.parent.mkdir(parents=True)
    deployments = [
        {"urls": [urls[MODEL]], "target": MODEL, "key_env": "UPSTREAM_KEY"},
        {"urls": [urls[OTHER]], "target": OTHER},
        {"urls": [f"http://127.0.0.1:{free_port()}"], "target": "away", "key_env": "UPSTREAM_KEY"},
    ]
    config.write_text(json.dumps({"deployments": deployments, "log": {"level": "debug"}}))
    (place / "request.json").write_text(json.dumps(CHAT))


def everything_said(place: Path, env: dict[str, str], upstream: str, looks: tuple[str, ...]) -> dict[str, str]:
    """What a proxy answers and logs, and what the commands print that look at it."""
    said: dict[str, str] = {}
    with started(env) as (child, url):
        for number, answer in enumerate(answers(url)):
            said[f"answer {number}"] = answer
        for look in looks:
            port = url.rpartition(":")[2]
            command = look.format(url=url, upstream=upstream, path=place, port=port).split()
            done = run(env, *command)
            said[look] = done.stdout + done.stderr
            assert said[look], look
        child.send_signal(signal.SIGTERM)
        said["log"] = "".join(child.communicate(timeout=20))
    return said


class Redirects(BaseHTTPRequestHandler):
    """What may listen where a proxy is expected: it sends everybody on, and keeps where tokens went."""

    tokens: ClassVar[dict[str, str | None]] = {}

    def do_GET(self) -> None:
        self.tokens[self.path] = self.headers.get("X-Specproxy-Token")
        self.send_response(302)
        self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Nothing."""


def test_a_command_carries_the_token_nowhere_else(tmp_path: Path) -> None:
    """A redirect is not followed: it is an error that says so."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Redirects)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        env = clean_env(tmp_path) | {"SPECPROXY_TOKEN": TOKEN}
        done = run(env, "status", "--url", f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert Redirects.tokens == {"/specproxy/api/status": TOKEN}
    assert done.returncode == 1
    assert "answered 302" in done.stderr
