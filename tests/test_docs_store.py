"""docs/several-proxies.md names the keys and bounds that there are."""

from __future__ import annotations

import re

import pytest

from specproxy.store import redis
from specproxy.store.redis import RedisStore
from tests.test_docs import ROOT, named

TEXT = (ROOT / "docs" / "several-proxies.md").read_text(encoding="utf-8")


@pytest.mark.redis
def test_keys_and_bounds_are_those_of_the_code() -> None:
    """Every key of the module's own table, its prefix, the expiry and the length of the log."""
    own = set(re.findall(r"^``([\w:<>]+)``", redis.__doc__ or "", re.M))
    keys = {key.removeprefix(redis.PREFIX) for key in named(TEXT) if key.startswith(redis.PREFIX)}
    assert {re.sub(r"policy:\w+", "policy:<name>", key) for key in keys if key and "*" not in key} == own
    assert f"expires {redis.EXPIRY_S // 86400} days" in TEXT
    store = RedisStore("redis://127.0.0.1:1/0")
    assert f"about {store._keep:,}" in TEXT
    assert f"about {store._keep_events:,}" in TEXT
