"""Dockerfile and compose files: what linters say, and that they name what there is. No engine runs here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from specproxy.cli.start import settings_of, start
from specproxy.config import load

ROOT = Path(__file__).parent.parent
FILES = ["compose.yaml", "compose.lanes.yaml"]
linted = pytest.mark.linters


def tool(name: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / name), *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def services(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())["services"]
    return found


@linted
def test_hadolint_finds_nothing() -> None:
    """Not even a hint."""
    done = tool("hadolint", "--failure-threshold", "info", "Dockerfile")
    assert (done.returncode, done.stdout) == (0, "")


@linted
@pytest.mark.parametrize("name", FILES)
def test_compose_lint_finds_nothing_grave(name: str) -> None:
    """It knows the form of compose files, and dangerous set-ups."""
    done = tool("compose-lint", name)
    assert done.returncode == 0, done.stdout + done.stderr


@linted
def test_the_linters_would_find_something(tmp_path: Path) -> None:
    """A broken file of each kind is refused."""
    (tmp_path / "Dockerfile").write_text("FROM python\nRUN cd /x && sudo rm\n")
    assert tool("hadolint", str(tmp_path / "Dockerfile")).returncode
    (tmp_path / "compose.yaml").write_text("services: {a: {image: b, privileged: true}}\n")
    assert tool("compose-lint", str(tmp_path / "compose.yaml")).returncode


@pytest.mark.parametrize("name", FILES)
def test_what_specproxy_is_started_with_can_be_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command and the variables are ones that this version knows."""
    service = services("compose.yaml")["specproxy"] | services(name)["specproxy"]
    words = [word.replace("${MODEL:-llama3.2:1b}", "llama3.2:1b") for word in service["command"]]
    assert words[0] == "start"
    monkeypatch.setenv("SPECPROXY_TOKEN", "secret")
    monkeypatch.setenv("SPECPROXY_HOST", "0.0.0.0")
    with start.make_context("start", words[1:]) as context:
        assert settings_of(context.params).upstream == ("http://ollama:11434",)
    own = {key: "x" for key in service["environment"] if key.startswith("SPECPROXY_")}
    assert load(environ=own | {"SPECPROXY_PORT": "8484"}).port == 8484


def test_the_image_sets_what_settings_there_are() -> None:
    """And listens where it is published, with the health route that there is."""
    text = (ROOT / "Dockerfile").read_text()
    assert "SPECPROXY_HOST=0.0.0.0" in text
    assert "EXPOSE 8484" in text
    assert "127.0.0.1:8484/specproxy/health" in text
    with pytest.raises(click.UsageError):
        start.make_context("start", ["--no-such-flag"])


def test_services_reach_each_other_by_name() -> None:
    """The chat talks to specproxy with its token, specproxy to Ollama; ports are on loopback alone."""
    found = services("compose.yaml")
    chat = found["chat"]["environment"]
    assert chat["OPENAI_API_BASE_URL"] == "http://specproxy:8484/v1"
    assert chat["OPENAI_API_KEY"] == found["specproxy"]["environment"]["SPECPROXY_TOKEN"]
    for service in found.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


def test_the_build_needs_no_other_file() -> None:
    """What is copied is let through by .dockerignore."""
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    lines = [line.split()[1:-1] for line in (ROOT / "Dockerfile").read_text().splitlines()]
    copied = {
        word
        for line, text in zip(lines, (ROOT / "Dockerfile").read_text().splitlines(), strict=True)
        if text.startswith("COPY") and "--from" not in text
        for word in line
    }
    assert copied == allowed
    assert all((ROOT / name).exists() for name in copied)
