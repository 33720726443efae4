"""`specproxy service`: let the system start the proxy at login, and stop doing so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from specproxy.cli.groups import Group
from specproxy.cli.options import config_option
from specproxy.cli.service_files import Manager, launchd, plist, systemd, unit
from specproxy.config import default_config_path, load
from specproxy.errors import ConfigError, SpecproxyError

__all__ = ["service"]

TIMEOUT_S = 90

dry_run_option = click.option("--dry-run", is_flag=True, help="Only print what would be written and run.")


@click.group(cls=Group, no_args_is_help=True)
def service() -> None:
    """Let the system run the proxy, or stop doing so.

    A systemd user unit on Linux, a launchd agent on macOS. No root rights are needed.
    """


@service.command()
@dry_run_option
@config_option
@click.argument("start_arguments", nargs=-1, metavar="[-- ARGUMENTS]")
def install(dry_run: bool, config_path: Path | None, start_arguments: tuple[str, ...]) -> None:
    """Write the service's file, start it now, and at every login.

    What stands behind -- goes to `specproxy start`: specproxy service install -- --upstream
    http://127.0.0.1:11434. The configuration is checked first.
    """
    command = _command(config_path, start_arguments)
    manager = _manager()
    text = plist(command, Path.home()) if manager.name == "launchd" else unit(command)
    if dry_run:
        click.echo(f"# {manager.path}\n{text}")
        _show(manager.install)
        return
    manager.path.parent.mkdir(parents=True, exist_ok=True)
    manager.path.write_text(text, encoding="utf-8")
    for step in manager.install:
        _run(step)
    click.echo(f"Installed {manager.path}; specproxy runs, and will at every login.")
    click.echo(f"Its log: {manager.logs}")
    if manager.name == "systemd":
        click.echo("To run it without anybody logged in: loginctl enable-linger")


@service.command()
@dry_run_option
@click.option("--purge", is_flag=True, help="Also remove statistics and configuration.")
@config_option
def uninstall(dry_run: bool, purge: bool, config_path: Path | None) -> None:
    """Stop the service and remove its file; nothing of it is left."""
    manager = _manager()
    folders = [load(config_path).state_dir, default_config_path().parent] if purge else []
    if dry_run:
        _show((*manager.uninstall, ("rm", "-f", str(manager.path)), *manager.after_removal))
        _show([("rm", "-r", str(folder)) for folder in folders if folder.is_dir()])
        return
    there = manager.path.exists()
    if there:
        for step in manager.uninstall:
            _run(step, may_fail=True)
        manager.path.unlink()
        for step in manager.after_removal:
            _run(step, may_fail=True)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    removed = [str(manager.path)] * there + [f"{folder}" for folder in folders]
    click.echo(f"Removed {', '.join(removed)}." if removed else "There was nothing to remove.")


@service.command()
def status() -> int:
    """Say whether it is installed, and whether it runs. Exit code 0 if it runs, else 1."""
    manager = _manager()
    if not manager.path.exists():
        click.echo("not installed (specproxy service install)")
        return 1
    running = _quiet(manager.status) == 0
    click.echo(f"installed at {manager.path}, {'running' if running else 'not running'}; log: {manager.logs}")
    return 0 if running else 1


def _command(config_path: Path | None, more: Sequence[str]) -> list[str]:
    """What the service runs: this very Python and package, wherever they are installed.

    Raises:
        ConfigError: the configuration or the arguments cannot be used.
    """
    from specproxy.cli.start import settings_of, start

    file = config_path.resolve() if config_path is not None else None
    given = [*(["--config", str(file)] if file is not None else []), *more]
    with start.make_context("start", list(given)) as context:
        settings_of(context.params)
    return [sys.executable, "-m", "specproxy", "start", *given]


def _manager() -> Manager:
    """The service manager of this system.

    Raises:
        SpecproxyError: there is none that we know.
    """
    if sys.platform == "darwin":
        return launchd(Path.home(), os.getuid())
    if shutil.which("systemctl") is None:
        raise SpecproxyError(
            "there is no systemd here", hint="start it by what your system has: specproxy start"
        )
    home = os.environ.get("XDG_CONFIG_HOME")
    return systemd(Path(home) if home else Path.home() / ".config")


def _run(step: Sequence[str], *, may_fail: bool = False) -> None:
    """Run a command of the service manager.

    Raises:
        SpecproxyError: it failed, and may not.
    """
    try:
        done = subprocess.run(step, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)  # noqa: S603 - fixed words
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SpecproxyError(f"{' '.join(step)}: {error}") from error
    if done.returncode and not may_fail:
        raise SpecproxyError(f"{' '.join(step)} failed: {(done.stderr or done.stdout).strip()}")


def _quiet(step: Sequence[str]) -> int:
    try:
        return subprocess.run(step, capture_output=True, timeout=TIMEOUT_S, check=False).returncode  # noqa: S603 - fixed words
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{' '.join(step)}: {error}") from error


def _show(steps: Sequence[Sequence[str]]) -> None:
    for step in steps:
        click.echo(f"$ {' '.join(step)}")
