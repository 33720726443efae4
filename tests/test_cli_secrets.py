"""No command, answer, log line or file of a running proxy holds a secret: all of them are searched."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.command import clean_env, run, started
from tests.support.ports import free_port
from tests.support.server import MODEL, openai_like

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
LOOKS_WITHOUT_STORE = ("status --url {url}", "report --url {url}", "config show", "start --port {port}")


@contextmanager
def server() -> Iterator[str]:
    """An upstream in a thread, since commands block."""
    loop, found, ready = asyncio.new_event_loop(), [""], threading.Event()

    async def serve() -> None:
        async with openai_like() as upstream:
            found[0] = upstream.url
            ready.set()
            await stop.wait()

    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    ready.wait()
    try:
        yield found[0]
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
    yield asked(url, "/v1/chat/completions", CHAT, Authorization=f"Bearer {CLIENT}")
    yield asked(url, "/v1/models", **ours)
    for page in ("", "api/status?all=1", "api/recent", "metrics", "none"):
        yield asked(url, f"/specproxy/{page}", **ours)
    yield asked(url, "/specproxy/api/lift", {"lane": "none"}, **ours)
    yield asked(url, "/specproxy/api/explain", CHAT, **ours)


@pytest.mark.parametrize("shared", [False, True])
def test_no_output_holds_a_secret(tmp_path: Path, *, shared: bool) -> None:
    """Our token, an upstream's key, a store's password and a client's key: all set or sent, none shown."""
    with server() as upstream:
        config = tmp_path / "config" / "specproxy" / "config.yaml"
        config.parent.mkdir(parents=True)
        deployments = [
            {"urls": [upstream], "target": MODEL, "key_env": "UPSTREAM_KEY"},
            {"urls": [f"http://127.0.0.1:{free_port()}"], "target": "away", "key_env": "UPSTREAM_KEY"},
        ]
        config.write_text(json.dumps({"deployments": deployments, "log": {"level": "debug"}}))
        env = clean_env(tmp_path) | {"SPECPROXY_TOKEN": TOKEN, "UPSTREAM_KEY": KEY}
        if shared:  # it is away, which errors tell of
            env["SPECPROXY_STORE"] = f"redis://:{PASSWORD}@127.0.0.1:{free_port()}/0"
        (tmp_path / "request.json").write_text(json.dumps(CHAT))
        said: dict[str, str] = {}
        with started(env) as (child, url):
            for number, answer in enumerate(answers(url)):
                said[f"answer {number}"] = answer
            for look in LOOKS_WITHOUT_STORE if shared else LOOKS:
                port = url.rpartition(":")[2]
                command = look.format(url=url, upstream=upstream, path=tmp_path, port=port).split()
                done = run(env, *command)
                said[look] = done.stdout + done.stderr
                assert said[look], look
            child.send_signal(signal.SIGTERM)
            said["log"] = "".join(child.communicate(timeout=20))
    for file in (path for path in tmp_path.rglob("*") if path.is_file()):
        said[file.name] = file.read_bytes().decode("latin-1")
    assert "four words of text" in said["answer 0"]
    assert [(name, secret) for name, text in said.items() for secret in SECRETS if secret in text] == []
