"""`specproxy service`: what it writes, what it runs, and that nothing is left of it."""

from __future__ import annotations

import configparser
import os
import plistlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specproxy.cli import main, service, service_files
from specproxy.cli.service_files import plist, unit

FAKE = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$*" in *is-active*) exit "${ACTIVE:-0}";; *enable*) exit "${ENABLES:-0}";; esac
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, and a systemctl that writes down what it is asked."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("systemctl", "launchctl"):
        (tools / name).write_text(FAKE)
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home" / ".config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home" / ".state"))
    for name in [n for n in os.environ if n.startswith("SPECPROXY_")]:
        monkeypatch.delenv(name)
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def calls(home: Path) -> list[str]:
    file = home.parent / "calls"
    return file.read_text().splitlines() if file.exists() else []


def files(home: Path) -> list[str]:
    return sorted(str(path.relative_to(home)) for path in home.rglob("*") if path.is_file())


UNIT = ".config/systemd/user/specproxy.service"


def test_install_writes_a_unit_and_starts_it(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The unit runs this very package with the given arguments; systemd is told of it and starts it."""
    assert main(["service", "install", "--", "--upstream", "http://127.0.0.1:11434"]) == 0
    read = configparser.ConfigParser(interpolation=None, strict=False)
    read.optionxform = str  # type: ignore[assignment,method-assign]  # as its documentation says
    read.read_string((home / UNIT).read_text())
    assert read["Service"]["ExecStart"] == (
        f"{sys.executable} -m specproxy start --upstream http://127.0.0.1:11434"
    )
    assert read["Service"]["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert read["Install"]["WantedBy"] == "default.target"
    assert calls(home) == ["--user daemon-reload", "--user enable --now specproxy.service"]
    assert "journalctl" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """As systemd's own check sees it, odd arguments included."""
    file = tmp_path / "specproxy.service"
    file.write_text(unit([sys.executable, "-m", "specproxy", "start", "--llama-args", "a b 50% $x 'q'"]))
    done = subprocess.run(
        ["systemd-analyze", "--user", "verify", str(file)], capture_output=True, text=True, check=False
    )
    assert "specproxy.service" not in done.stderr


def test_uninstall_leaves_nothing(home: Path) -> None:
    """No file; it was stopped, disabled, and systemd forgot it. A second time there is nothing to do."""
    assert main(["service", "install"]) == 0
    assert files(home) == [UNIT]
    assert main(["service", "uninstall"]) == 0
    assert files(home) == []
    assert calls(home)[2:] == [
        "--user disable --now specproxy.service",
        "--user daemon-reload",
        "--user reset-failed specproxy.service",
    ]
    count = len(calls(home))
    assert main(["service", "uninstall"]) == 0
    assert len(calls(home)) == count


def test_purge_takes_statistics_and_configuration_along(home: Path) -> None:
    """Nothing at all is left; without it both stay."""
    for file in (".state/specproxy/state.db", ".config/specproxy/config.yaml"):
        (home / file).parent.mkdir(parents=True)
        (home / file).write_text("")
    assert main(["service", "uninstall"]) == 0
    assert len(files(home)) == 2
    assert main(["service", "uninstall", "--purge"]) == 0
    assert files(home) == []


def test_dry_run_changes_nothing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints the file and the commands."""
    assert main(["service", "install", "--dry-run", "--", "--port", "9000"]) == 0
    out = capsys.readouterr().out
    assert "ExecStart=" in out
    assert "$ systemctl --user enable --now specproxy.service" in out
    assert main(["service", "uninstall", "--dry-run"]) == 0
    assert f"$ rm -f {home / UNIT}" in capsys.readouterr().out
    assert (files(home), calls(home)) == ([], [])


@pytest.mark.parametrize(
    ("installed", "active", "code", "says"),
    [(True, "0", 0, "running"), (True, "3", 1, "not running"), (False, "0", 1, "specproxy service install")],
)
def test_status(
    home: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    installed: bool,
    active: str,
    code: int,
    says: str,
) -> None:
    """Exit code 0 only if it runs."""
    if installed:
        main(["service", "install"])
    monkeypatch.setenv("ACTIVE", active)
    assert main(["service", "status"]) == code
    assert says in capsys.readouterr().out


def test_a_configuration_that_cannot_be_used_is_not_installed(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is written: a service that fails at every login helps nobody."""
    assert main(["service", "install", "--", "--port", "abc"]) == 2
    assert "port: 'abc'" in capsys.readouterr().err
    assert main(["service", "install", "--", "--prot", "1"]) == 2
    assert files(home) == []


def test_a_systemctl_that_fails_is_told(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1, and the command."""
    monkeypatch.setenv("ENABLES", "1")
    assert main(["service", "install"]) == 1
    assert "systemctl --user enable --now specproxy.service failed" in capsys.readouterr().err


def test_without_systemd_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what to do instead."""
    monkeypatch.setenv("PATH", "")
    assert main(["service", "status"]) == 1
    assert "specproxy start" in capsys.readouterr().err


def test_launchd(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On macOS a property list in LaunchAgents, loaded and unloaded by launchctl; nothing is left either."""
    monkeypatch.setattr(service.sys, "platform", "darwin")
    agent = f"Library/LaunchAgents/{service_files.LABEL}.plist"
    assert main(["service", "install", "--", "--port", "9000"]) == 0
    data = plistlib.loads((home / agent).read_bytes())
    assert data["ProgramArguments"] == [sys.executable, "-m", "specproxy", "start", "--port", "9000"]
    assert (data["RunAtLoad"], data["KeepAlive"]) == (True, {"SuccessfulExit": False})
    assert calls(home) == [f"bootstrap gui/{os.getuid()} {home / agent}"]
    assert main(["service", "uninstall"]) == 0
    assert files(home) == []
    assert plistlib.loads(plist(["a"], home).encode())["Label"] == service_files.LABEL
