"""What is read out of a router's list of presets."""

from __future__ import annotations

from typing import Any

import pytest

from specproxy.adapters.base import ServedModel
from specproxy.adapters.http import Endpoint, HttpTransport
from specproxy.adapters.llama_router import read_sections, watch_load
from specproxy.adapters.probe import Prober
from specproxy.records import Strategy
from tests.support.fake_router import FakeRouter, arguments
from tests.support.ports import free_port

PLAIN = arguments("/m.gguf", "--spec-type", "none")
NGRAM = arguments("/m.gguf", "--spec-type", "ngram-simple", "--spec-ngram-simple-size-m", "8", alias="m-ngram")
MTP = arguments("/m.gguf", "--spec-type", "draft-mtp", "--spec-draft-n-max", "3", alias="m-mtp")


def section(args: list[str], name: str = "m", **more: Any) -> ServedModel:
    [model] = read_sections([{"id": name, "status": {"value": "loaded", "args": args}} | more])
    return model


def test_sections_that_differ_in_decoding_only_are_one_model() -> None:
    """Name, threads and slots make no difference to what is said either."""
    one = section(PLAIN)
    for args in (NGRAM, MTP, [*PLAIN, "--threads", "3"], [*NGRAM, "-md", "/d.gguf"]):
        assert section(args).group == one.group
        assert section(args).setup != one.setup


@pytest.mark.parametrize(
    "flags", [("--temp", "1.2"), ("--chat-template", "chatml"), ("--mmproj", "/p.gguf"), ("--lora", "/l.gguf")]
)
def test_sections_that_say_something_else_are_other_models(flags: tuple[str, ...]) -> None:
    """Sampling defaults, templates, projectors and adapters change answers."""
    assert section([*PLAIN, *flags]).group != section(PLAIN).group
    assert section(arguments("/other.gguf", "--spec-type", "none")).group != section(PLAIN).group


@pytest.mark.parametrize(
    ("args", "strategy"),
    [
        (PLAIN, Strategy()),
        (arguments("/m.gguf", "-md", "/d.gguf"), Strategy()),  # a draft without a type is never used
        (NGRAM, Strategy(("ngram",), 8)),
        (MTP, Strategy(("mtp",), 3)),
        (arguments("/m.gguf", "--spec-type", "ngram-simple,draft-eagle3"), Strategy(("ngram", "eagle3"))),
    ],
)
def test_how_a_section_decodes(args: list[str], strategy: Strategy) -> None:
    """By its command line, in our names."""
    assert section(args).strategy == strategy
    assert section(args).drafting is not strategy.is_plain


@pytest.mark.parametrize(
    ("flags", "lengths"),
    [
        ("--spec-type ngram-simple", (12, 48)),
        ("--spec-type ngram-simple --spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m 8", (3, 8)),
        ("--spec-type ngram-simple --spec-ngram-simple-min-hits 2", None),
        ("--spec-type ngram-simple,draft-mtp", None),
        ("--spec-type ngram-mod", None),
        ("--spec-type none", None),
    ],
)
def test_how_a_section_drafts_by_ngrams(flags: str, lengths: tuple[int, int] | None) -> None:
    """Where it is such that what it would have drafted can be found out afterwards."""
    assert section(arguments("/m.gguf", *flags.split())).ngram == lengths


def test_what_a_section_says_of_itself() -> None:
    """State, failure, files, context, what it reads and whether it writes."""
    seeing = {"architecture": {"input_modalities": ["text", "image"], "output_modalities": ["text"]}}
    model = section([*PLAIN, "-md", "/d.gguf"], **seeing, aliases=["n"])
    assert (model.path, model.draft, model.ctx, model.slots) == ("/m.gguf", "/d.gguf", 2048, 1)
    assert (model.capabilities, model.aliases, model.loaded) == (frozenset({"vision"}), ("n",), True)
    deciding = {"architecture": {"input_modalities": ["text"], "output_modalities": ["decisions"]}}
    assert section(PLAIN, **deciding).unrouted == "it generates no text"
    [asleep] = read_sections([{"id": "m", "status": {"value": "sleeping", "args": PLAIN}}])
    assert not asleep.loaded
    [failed] = read_sections([{"id": "m", "status": {"value": "unloaded", "failed": True, "exit_code": 3}}])
    assert "exit code 3" in failed.failed
    assert read_sections([{"id": "m"}, {"no": "id"}, {"id": "n", "status": 7}])[1].group == "n"


async def test_a_probe_asks_only_what_loads_nothing() -> None:
    """Slots of loaded sections, once a load, with autoload off; none of those that are not."""
    async with FakeRouter({"m": PLAIN, "m-mtp": MTP}, misfits=frozenset({"m-mtp"})) as router:
        probe = Prober()
        found = await probe(router.url)
        assert (found.kind, found.detail) == ("llama-router", {"models_max": 4, "autoload": True})
        assert [model.drafting for model in found.served] == [False, True]  # as claimed
        assert router.loaded == []
        router.loaded.append("m-mtp")
        for _ in range(2):
            found = await probe(router.url)
            assert [model.drafting for model in found.served] == [False, False]  # as it is
        assert router.asked.count("GET /slots?model=m-mtp&autoload=false") == 1
        router.loaded.clear()
        await probe(router.url)
        router.loaded.append("m-mtp")
        await probe(router.url)
        assert router.asked.count("GET /slots?model=m-mtp&autoload=false") == 2


async def test_a_load_is_watched_to_its_end() -> None:
    """Its seconds are told; what was loaded before, fails or goes away tells nothing."""
    async with FakeRouter({"m": PLAIN, "bad": PLAIN}) as router:
        transport = HttpTransport(Endpoint.parse(router.url))
        looks = []

        class Watched(list[str]):
            """Loaded at the third look."""

            def __contains__(self, name: object) -> bool:
                looks.append(name)
                return len(looks) > 4

        router.loaded = Watched()
        took = await watch_load(transport, "m", poll_s=0.001)
        assert took is not None
        assert took > 0
        router.loaded = ["m"]
        assert await watch_load(transport, "m") is None
        router.failed.add("bad")
        assert await watch_load(transport, "bad") is None
        assert await watch_load(transport, "nobody") is None
        await transport.aclose()
    assert await watch_load(HttpTransport(Endpoint.parse(f"http://127.0.0.1:{free_port()}")), "m") is None
