"""How the engine's threads are told to wait."""

from __future__ import annotations

import pytest

from specproxy.adapters.embedded.environment import engine_environment


def test_spinning_is_limited_by_default() -> None:
    """One variable, which libgomp reads."""
    assert engine_environment({"HOME": "/"}) == {"GOMP_SPINCOUNT": "1000"}


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_what_the_user_has_set_stays(name: str) -> None:
    """Neither is touched, nor another one added that would contradict it."""
    assert engine_environment({name: "5"}) == {}
