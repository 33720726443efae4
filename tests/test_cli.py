"""Commands that need no running proxy: help, versions, configuration, completion, and how errors look."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner

import specproxy
from specproxy.cli import COMMANDS, cli, main
from specproxy.config import ENV_PREFIX, Settings
from tests.support.ports import free_port

ROOT = Path(specproxy.__file__).parent.parent
HEAVY = {"aiohttp", "rich", "numpy", "pydantic", "structlog", "prometheus_client", "gguf", "yaml"}


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in [n for n in os.environ if n.startswith(ENV_PREFIX)]:
        monkeypatch.delenv(name)


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command line."""
    code = main(args)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_version_agrees_with_the_changelog(capsys: pytest.CaptureFixture[str]) -> None:
    """--version, the package and the changelog's first entry are one version."""
    code, out, _ = run(capsys, "--version")
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert (code, out.split()[-1]) == (0, specproxy.__version__)
    assert newest[1] == specproxy.__version__


def test_version_names_the_engines(capsys: pytest.CaptureFixture[str]) -> None:
    """The command says of each optional engine which version is there, or how to get it."""
    _, out, _ = run(capsys, "version", "--json")
    found = json.loads(out)
    assert found["specproxy"] == specproxy.__version__
    assert {"python", "llama-cpp-python", "xllamacpp", "redis"} <= set(found)
    _, out, _ = run(capsys, "version")
    for name, number in found.items():
        assert f"{name:<17} {number or 'not installed'}" in out


def test_help_imports_nothing_heavy() -> None:
    """--help answers at once: none of the big libraries is loaded."""
    script = "import sys; from specproxy.cli import main; main(['--help']); print(','.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not HEAVY & {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split(",")}
    for name, (_, _, text) in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(text)}$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("columns", [40, 80, 140])
@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, columns: int
) -> None:
    """No line is longer, but for commands that are to be copied and names that cannot be broken."""
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main([*([name] if name else []), "--help"]) == 0
    for line in capsys.readouterr().out.splitlines():
        copied = "specproxy " in line or len(line.split()) <= 3
        assert len(line) <= columns or copied, line


def test_listed_help_is_each_commands_own() -> None:
    """The list in --help and the first line of a command's own help say the same."""
    context = click.Context(cli)
    for name, (_, _, text) in COMMANDS.items():
        command = cli.get_command(context, name)
        assert command is not None
        assert (command.help or "").split("\n\n")[0].strip().startswith(text.rstrip(".")), name


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["strat"], "No such command 'strat'; did you mean start? (see specproxy --help)"),
        (["xyzzy"], "No such command 'xyzzy' (see specproxy --help)"),
        (
            ["start", "--uptream", "x"],
            "No such option '--uptream'; did you mean --upstream? (see specproxy start --help)",
        ),
        (["start", "--port", "abc"], "--port: port: 'abc': should be a valid integer"),
        (["start", "--engine", "fast"], "--engine: engine: 'fast': should be 'auto', 'embedded' or 'managed'"),
        (
            ["start", "--host", "0.0.0.0"],
            "host: '0.0.0.0' is reachable from other machines, which needs a token",
        ),
        (["start", "--draft", "d.gguf"], "draft: a draft model needs its target"),
        (["start", "--config", "nowhere.yaml"], "config file nowhere.yaml cannot be read: No such file"),
        (["start", "extra"], "Got unexpected extra argument"),
        (["config", "chek"], "No such command 'chek'; did you mean check?"),
    ],
)
def test_a_command_that_cannot_be_used_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], args: list[str], line: str
) -> None:
    """One line on stderr with the nearest name, nothing on stdout, no traceback."""
    code, out, err = run(capsys, *args)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert err.startswith(f"specproxy: {line}")


def test_start_has_a_flag_for_every_top_level_key() -> None:
    """Only secrets, lists for other sites and what hardly anyone changes are left to file and environment."""
    command = cli.get_command(click.Context(cli), "start")
    assert command is not None
    flags = {param.name for param in command.params}
    elsewhere = {
        "token",
        "origins",
        "learner",
        "limits",
        "log",
        "capture",
        "aliases",
        "deployments",
        "probe_fields",
    }
    assert set(Settings.model_fields) - flags == elsewhere


ASKING = [
    ["status"],
    ["status", "--json"],
    ["explain", "-"],
    ["top"],
    ["verify"],
    ["bench"],
    ["quarantine", "list"],
]


def test_every_command_that_asks_a_proxy_is_tried_without_one() -> None:
    """Those with --url; a report works without a proxy."""
    asking = set()
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        inner = command.commands.values() if isinstance(command, click.Group) else ()
        if any(param.name == "url" for one in (command, *inner) if one for param in one.params):
            asking.add(name)
    assert asking - {"report"} == {args[0] for args in ASKING}


@pytest.mark.parametrize("args", ASKING, ids=" ".join)
def test_without_a_proxy_commands_say_how_to_start_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, args: list[str]
) -> None:
    """Exit code 1, and the command to type."""
    port = free_port()
    if args[-1] == "-":
        request = tmp_path / "r.json"
        request.write_text("{}")
        args = ["explain", str(request)]
    code, out, err = run(capsys, *args, "--url", f"127.0.0.1:{port}")
    assert (code, out) == (1, "")
    assert f"no proxy is running at http://127.0.0.1:{port}" in err
    assert "`specproxy start`" in err
    monkeypatch.setenv("SPECPROXY_PORT", str(port))
    assert f"`specproxy start --port {port}`" in run(capsys, *args)[2]


@pytest.mark.parametrize(
    "answer",
    [
        b"220 mail.example ESMTP\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\n\r\n[]",
        b"",
    ],
)
@pytest.mark.parametrize("args", ASKING, ids=" ".join)
def test_what_is_no_proxy_is_said_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, args: list[str], answer: bytes
) -> None:
    """Something that speaks no HTTP, breaks off or says something else: exit code 1, and no traceback."""
    if args[-1] == "-":
        (tmp_path / "r.json").write_text("{}")
        args = ["explain", str(tmp_path / "r.json")]
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    conn, _ = server.accept()
                    with conn:
                        conn.recv(4096)
                        conn.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            code, out, err = run(capsys, *args, "--url", f"127.0.0.1:{server.getsockname()[1]}")
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
    assert (code, out) == (1, "")
    assert re.match(r"specproxy: (something other than specproxy answers|no proxy is running) at ", err)
    assert len(err.splitlines()) <= 2


@pytest.mark.parametrize(
    "url", ["http://[::1", "http://host:port", "http://h:99999", "ftp://h", "http://me:hush@h", ""]
)
def test_a_url_that_is_none_is_exit_code_2(capsys: pytest.CaptureFixture[str], url: str) -> None:
    """With what it should look like, and without a password that it may hold."""
    code, out, err = run(capsys, "status", "--url", url)
    if url:
        assert (code, out) == (2, "")
        assert "should be an address such as http://127.0.0.1:8484" in err
        assert "hush" not in err
    else:  # the one that is configured
        assert code == 1


@pytest.mark.parametrize(("text", "says"), [(None, "cannot be read"), ("{", "is not JSON")])
def test_explain_wants_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str | None, says: str
) -> None:
    """A file that is missing or broken is a usage error."""
    file = tmp_path / "r.json"
    if text is not None:
        file.write_text(text)
    code, _, err = run(capsys, "explain", str(file))
    assert code == 2
    assert says in err


def test_config_check(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A good file is fine, a bad one exits with 2 and names each problem."""
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("port: 1\n")
    bad.write_text("prot: 1\nslots: 0\n")
    assert run(capsys, "config", "check", str(good)) == (0, f"{good}: fine\n", "")
    code, _, err = run(capsys, "config", "check", str(bad))
    assert code == 2
    assert len(err.splitlines()) == 2
    assert "did you mean port?" in err


def test_config_show_can_be_read_back(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is shown is the settings in force, as a file that gives them again; the token is not shown."""
    monkeypatch.setenv("SPECPROXY_PORT", "4242")
    monkeypatch.setenv("SPECPROXY_TOKEN", "s3cret")
    _, out, _ = run(capsys, "config", "show")
    assert "s3cret" not in out
    shown = yaml.safe_load(out)
    assert shown["port"] == 4242
    del shown["token"]
    assert Settings.model_validate(shown).port == 4242


def test_config_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    """The schema is valid JSON that names the keys."""
    _, out, _ = run(capsys, "config", "schema")
    assert set(json.loads(out)["properties"]) == set(Settings.model_fields)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_name_the_program(shell: str) -> None:
    """Each shell gets a script for specproxy."""
    done = CliRunner().invoke(cli, ["completion", shell])
    assert done.exit_code == 0
    assert "_SPECPROXY_COMPLETE" in done.output


def test_completion_completes_commands_and_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts' questions are answered by the installed program."""
    env = os.environ | {
        "_SPECPROXY_COMPLETE": "bash_complete",
        "COMP_WORDS": "specproxy start --up",
        "COMP_CWORD": "2",
    }
    done = subprocess.run(
        [sys.executable, "-m", "specproxy"], env=env, capture_output=True, text=True, check=False
    )
    assert "--upstream" in done.stdout
