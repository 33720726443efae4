"""How the engine's threads wait, and what its memory is made of."""

from __future__ import annotations

from pathlib import Path

import pytest

from specproxy.adapters.embedded.environment import engine_environment, huge_pages

HUGE = "glibc.malloc.hugetlb=1"


def test_spinning_is_limited_and_pages_are_huge_by_default() -> None:
    """One variable that libgomp reads, and one that glibc reads."""
    assert engine_environment({"HOME": "/"}) == {"GOMP_SPINCOUNT": "10000", "GLIBC_TUNABLES": HUGE}


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_what_the_user_has_set_about_waiting_stays(name: str) -> None:
    """Neither is touched, nor another one added that would contradict it."""
    assert engine_environment({name: "5"}) == {"GLIBC_TUNABLES": HUGE}


def test_what_the_user_has_set_about_memory_stays() -> None:
    """glibc's variable holds several settings, which are left alone together."""
    assert engine_environment({"GLIBC_TUNABLES": "glibc.malloc.check=1"}) == {"GOMP_SPINCOUNT": "10000"}


@pytest.mark.parametrize(
    ("enabled", "tunables", "expected"),
    [
        ("[always] madvise never", "", True),
        ("always [madvise] never", HUGE, True),
        ("always [madvise] never", f"glibc.malloc.check=1:{HUGE}", True),
        ("always [madvise] never", "", False),
        ("always madvise [never]", HUGE, False),
        (None, HUGE, False),
    ],
)
def test_huge_pages_come_where_kernel_and_glibc_agree(
    tmp_path: Path, enabled: str | None, tunables: str, expected: bool
) -> None:
    """The kernel gives them to all or to those who ask, and glibc asks if told to."""
    pages = tmp_path / "enabled"
    if enabled is not None:
        pages.write_text(enabled)
    assert huge_pages({"GLIBC_TUNABLES": tunables}, pages) is expected
