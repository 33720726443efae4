"""What docs/threat-model.md promises and no other test holds: secrets, files, and where requests may go."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from specproxy.config import load
from specproxy.errors import ConfigError
from specproxy.proxy.guard import Guard
from specproxy.proxy.service import Service
from tests.proxy.test_service import ask, chat, running, settings
from tests.support.client import RawClient, post
from tests.support.proxy import running_proxy
from tests.support.relay import CHAT, Recorder
from tests.support.server import openai_like
from tests.support.upstream import Upstream

SECRET = "canary-secret-5519"


async def test_no_secret_is_told_or_kept(tmp_path: Path) -> None:
    """Neither our token nor a client's key is in the log, an answer of ours, metrics or any file of ours."""
    async with openai_like() as upstream:
        with capture_logs() as logs:
            async with running(settings(tmp_path, upstream.url, token=SECRET)) as service:
                key = f"Bearer {SECRET}-of-the-client"
                assert (await chat(service, X_Specproxy_Token=SECRET, Authorization=key)).status == 200
                answers = [await chat(service, Authorization=f"Bearer {SECRET}-wrong")]
                answers.append(await chat(service, X_Specproxy_Token=SECRET, X_Specproxy_Strategy="none such"))
                for page in ("api/status?all=1", "api/recent", "metrics", ""):
                    answers.append(await ask(service, "GET", f"/specproxy/{page}", X_Specproxy_Token=SECRET))
    assert [answer.status for answer in answers] == [401, 400, 200, 200, 200, 200]
    assert SECRET.encode() not in b"".join(answer.head + answer.content for answer in answers)
    assert SECRET not in repr(logs)
    for file in (p for p in tmp_path.rglob("*") if p.is_file()):  # noqa: ASYNC240 (nothing else runs)
        assert SECRET.encode() not in file.read_bytes(), file.name


def test_a_stores_password_is_never_shown(tmp_path: Path) -> None:
    """Neither in an error nor where settings are printed."""
    with pytest.raises(ConfigError) as raised:
        load(environ={"SPECPROXY_STORE": f"http://:{SECRET}@host"})
    assert SECRET not in str(raised.value)
    given = load(environ={"SPECPROXY_STORE": f"redis://:{SECRET}@127.0.0.1:1/0"})
    assert SECRET not in json.dumps(given.model_dump(mode="json"))
    assert SECRET not in repr(given)


async def test_files_in_the_state_directory_are_private(tmp_path: Path) -> None:
    """Everything that a run leaves there is for its owner alone."""
    async with openai_like() as upstream, running(settings(tmp_path, upstream.url)) as service:
        assert (await chat(service)).status == 200
        service._recorder.save()  # type: ignore[union-attr]  # it is there while the service runs
        await service._writer.run(lambda store: None)  # type: ignore[union-attr]  # as above
        place = tmp_path / "state"
        files = [path for path in place.rglob("*") if path.is_file()]
        assert files
        assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in files} == {0}
        assert stat.S_IMODE(place.stat().st_mode) & 0o077 == 0


@pytest.mark.parametrize("compared", ["X-Specproxy-Token", "Authorization"])
def test_the_token_is_compared_in_constant_time(compared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hmac.compare_digest, whatever was sent and wherever."""
    seen: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        seen.append((a, b))
        return False

    monkeypatch.setattr("specproxy.proxy.guard.hmac.compare_digest", compare)
    headers = {compared.lower(): "Bearer x" if compared == "Authorization" else "x"}

    class Headers(dict[str, str]):
        def get(self, name: str, default: Any = None) -> Any:
            return headers.get(name.lower(), default)

    with pytest.raises(Exception, match="token"):
        Guard(SECRET).check(Headers())
    assert (b"x", SECRET.encode()) in seen


# --- where requests may go -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "headers"),
    [
        (b"POST http://{other}/v1/chat/completions HTTP/1.1", ()),
        (b"POST //{other}/v1/chat/completions HTTP/1.1", ()),
        (b"POST /v1/chat/completions HTTP/1.1", (b"Host: {other}",)),
        (b"POST /v1/chat/completions HTTP/1.1", (b"X-Specproxy-Strategy: http://{other}",)),
        (b"POST /v1/chat/completions HTTP/1.1", (b"X-Specproxy-Lane: {other}", b"X-Forwarded-Host: {other}")),
        (b"CONNECT {other} HTTP/1.1", ()),
    ],
)
async def test_a_client_reaches_no_other_upstream(line: bytes, headers: tuple[bytes, ...]) -> None:
    """Neither by target, nor by Host, nor by a header of ours."""
    other, own = Recorder(), Recorder()
    async with (
        Upstream(other) as elsewhere,
        Upstream(own) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        name = b"127.0.0.1:%d" % elsewhere.port
        lines = [line, *headers, b"Content-Length: %d" % len(CHAT)]
        if not any(header.startswith(b"Host") for header in headers):
            lines.append(b"Host: x")
        await client.send(b"\r\n".join(lines).replace(b"{other}", name) + b"\r\n\r\n" + CHAT)
        status = (await client.head()).status
        assert (elsewhere.connections, other.seen) == (0, [])
        assert status in (200, 400, 405)
        assert (status == 200) == (len(own.seen) == 1)


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 4\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\nContent-Length: 4",
        b"Content-Length: 4\r\nContent-Length: 5",
        b"Content-Length: +4",
        b"Content-Length: 4, 4",
        b"Content-Length: -1",
        b"Content-Length : 4",
        b"Transfer-Encoding: xchunked",
        b"Transfer-Encoding: chunked, identity",
        b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\nContent-Length: 3",
        b"X: a\r\n Content-Length: 4",
        b"X: a\0b\r\nContent-Length: 4",
        b"Content-Length: 4\rX: y",
    ],
)
async def test_ambiguous_framing_is_refused(framing: bytes) -> None:
    """What two parsers might read in two ways reaches no upstream, and nothing behind it is a request."""
    own = Recorder()
    async with (
        Upstream(own) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        hidden = b"GET /hidden HTTP/1.1\r\nHost: x\r\n\r\n"
        await client.send(b"POST /x HTTP/1.1\r\nHost: x\r\n%b\r\n\r\n0\r\n\r\n%b" % (framing, hidden))
        answer = await client.rest()
        assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 501 "))
        assert answer.count(b"HTTP/1.1 ") == 1
        assert own.seen == []


async def test_a_model_name_cannot_inject_headers() -> None:
    """What a client calls its model is in no header, and a pin with line ends is one line of text."""
    own = Recorder()
    body = json.dumps({"model": "m\r\nX-Evil: 1", "messages": [{"role": "user", "content": "hi"}]}).encode()
    async with (
        Upstream(own) as upstream,
        running_proxy(upstream.url) as proxy,
        await RawClient.connect(proxy.port) as client,
    ):
        reply = await client.ask(post("/v1/chat/completions", body))
        assert reply.values(b"X-Evil") == []
        assert own.seen[0].values(b"X-Evil") == []


def test_listening_to_others_needs_a_token() -> None:
    """It refuses to start, and says what to do."""
    with pytest.raises(ConfigError, match="SPECPROXY_TOKEN"):
        load(flags={"host": "0.0.0.0"}, environ={})
    assert Service(load(flags={"host": "0.0.0.0"}, environ={"SPECPROXY_TOKEN": SECRET})).settings.token
