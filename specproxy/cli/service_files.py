"""The service's own description, for systemd (of the user) and for launchd. Text only: nothing is run here."""

from __future__ import annotations

import plistlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LABEL", "UNIT", "Manager", "launchd", "plist", "systemd", "unit"]

UNIT = "specproxy.service"
LABEL = "io.github.specproxy"
STOP_S = 60  # above the default grace, so that requests in flight can end


@dataclass(frozen=True, slots=True)
class Manager:
    """How a service manager is talked to: its file, and the commands after writing and before removing it."""

    name: str
    path: Path
    install: tuple[tuple[str, ...], ...]
    uninstall: tuple[tuple[str, ...], ...]
    after_removal: tuple[tuple[str, ...], ...]
    status: tuple[str, ...]
    logs: str


def systemd(config_home: Path) -> Manager:
    """The user's systemd; `config_home` is usually ~/.config."""
    user = ("systemctl", "--user")
    return Manager(
        "systemd",
        config_home / "systemd" / "user" / UNIT,
        install=((*user, "daemon-reload"), (*user, "enable", "--now", UNIT)),
        uninstall=((*user, "disable", "--now", UNIT),),
        after_removal=((*user, "daemon-reload"), (*user, "reset-failed", UNIT)),
        status=(*user, "is-active", UNIT),
        logs=f"journalctl --user -u {UNIT} -f",
    )


def launchd(home: Path, user_id: int) -> Manager:
    """The user's launchd on macOS."""
    domain = f"gui/{user_id}"
    path = home / "Library" / "LaunchAgents" / f"{LABEL}.plist"
    return Manager(
        "launchd",
        path,
        install=(("launchctl", "bootstrap", domain, str(path)),),
        uninstall=(("launchctl", "bootout", f"{domain}/{LABEL}"),),
        after_removal=(),
        status=("launchctl", "print", f"{domain}/{LABEL}"),
        logs=f"tail -f {_log_file(home)}",
    )


def unit(command: Sequence[str]) -> str:
    """A systemd unit that runs `command`; it restarts after a failure, and reads its settings on reload."""
    return f"""[Unit]
Description=specproxy, routes LLM requests to the fastest decoding strategy
Wants=network-online.target
After=network-online.target

[Service]
ExecStart={" ".join(map(_quoted, command))}
ExecReload=/bin/kill -HUP $MAINPID
Restart=on-failure
RestartSec=5
RestartPreventExitStatus=2
TimeoutStopSec={STOP_S}
KillMode=mixed
NoNewPrivileges=true
UMask=0077

[Install]
WantedBy=default.target
"""


def plist(command: Sequence[str], home: Path) -> str:
    """The same for launchd."""
    log = str(_log_file(home))
    data = {
        "Label": LABEL,
        "ProgramArguments": list(command),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 5,
        "ExitTimeOut": STOP_S,
        "Umask": 0o077,
        "StandardOutPath": log,
        "StandardErrorPath": log,
    }
    return plistlib.dumps(data, sort_keys=False).decode()


def _log_file(home: Path) -> Path:
    return home / "Library" / "Logs" / "specproxy.log"


def _quoted(word: str) -> str:
    """A word of ExecStart: systemd expands % and $, and reads shell-like quotes."""
    return shlex.quote(word.replace("%", "%%").replace("$", "$$"))
