"""The wheel: built, installed into a clean environment with its dependencies, started, and removed again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

import specproxy
from tests.docs.pages import ROOT
from tests.support.command import clean_env
from tests.support.ports import free_port

pytestmark = [pytest.mark.docs, pytest.mark.timeout(900)]

PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")


def call(*command: str, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=600, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in path.parts}


def test_a_wheel_installs_runs_and_goes(tmp_path: Path) -> None:
    """As `pip install`, `uv tool install` and pipx do it. It answers, and uninstalling leaves nothing."""
    call(sys.executable, *PIP, "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT))
    (wheel,) = tmp_path.glob("specproxy-*.whl")
    venv = tmp_path / "venv"
    call(sys.executable, "-m", "venv", str(venv))
    python = str(venv / "bin" / "python")
    site = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip())
    env = clean_env(tmp_path) | {"PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    env.pop("PYTHONPATH", None)
    call(python, *PIP, "install", str(wheel), env=env)
    before = {name for name in files(venv) if "specproxy" not in name}
    version = call(str(venv / "bin" / "specproxy"), "--version", env=env)
    assert version.split()[-1] == specproxy.__version__
    assert (site / "specproxy" / "py.typed").exists()
    answers(venv / "bin" / "specproxy", env)
    call(python, *PIP, "uninstall", "--yes", "specproxy", env=env)
    assert {name for name in files(venv) if "specproxy" in name} == set()
    assert files(venv) == before


def answers(program: Path, env: dict[str, str]) -> None:
    """The installed proxy starts outside of the source tree, serves its page, and ends well."""
    port = free_port()
    url = f"http://127.0.0.1:{port}/specproxy/"
    command = [str(program), "start", "--port", str(port), "--upstream", f"http://127.0.0.1:{free_port()}"]
    with subprocess.Popen(command, env=env, cwd="/", stdout=subprocess.DEVNULL) as child:
        deadline = time.monotonic() + 120
        page = b""
        while not page and time.monotonic() < deadline:
            assert child.poll() is None
            with suppress(OSError), urllib.request.urlopen(url, timeout=5) as reply:
                page = reply.read()
            time.sleep(0.05)
        assert b"<html" in page
        child.terminate()
        assert child.wait(60) == 0
