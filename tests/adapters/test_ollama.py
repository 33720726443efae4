"""What Ollama says about its models, in whatever shape it comes."""

from __future__ import annotations

import pytest

from specproxy.adapters.ollama import read_models, read_show


@pytest.mark.parametrize("odd", [7, "text", {"a": 1}, None, [1, None], True])
def test_capabilities_of_another_kind_are_none(odd: object) -> None:
    """A reply that is not as Ollama writes it must not stop the look at all models."""
    tags = {"models": [{"name": "m", "capabilities": odd}, {"name": "n", "capabilities": ["completion", 3]}]}
    odd_one, good = read_models(tags, {"models": odd})
    assert (odd_one.name, odd_one.capabilities) == ("m", frozenset())
    assert good.capabilities == {"completion"}
    assert read_show(good, {"capabilities": odd, "model_info": odd, "modelfile": odd}).capabilities == {
        "completion"
    }
