"""Drafts that lie about: which of them fit, and which is best. The models are real files, small ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from specproxy.adapters.draft_search import files_beside, find_drafts
from specproxy.adapters.gguf_facts import read_facts
from tests.support.calibrated import CalibratedPair, Region, write_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> CalibratedPair:
    """A target with a draft of about a fifth of its size, a stranger's draft, and files that are no models."""
    folder = tmp_path_factory.mktemp("models")
    pair = write_pair(folder, embd=256, layers=6)
    other = write_pair(folder / "other", regions=(Region("x", 200, mtp=0.9, draft=0.9),))
    shutil.copy(other.draft, folder / "stranger.gguf")
    shutil.copy(pair.target, folder / "copy.gguf")
    (folder / "junk.gguf").write_bytes(b"GGUF\x03\x00\x00\x00junk")
    (folder / "folder.gguf").mkdir()
    (folder / "dangling.gguf").symlink_to(folder / "nowhere")
    return pair


def test_the_fitting_one_comes_first_and_the_others_say_why_not(pair: CalibratedPair) -> None:
    """Copies, junk, folders and links to nothing are left out."""
    found = find_drafts(read_facts(pair.target), files_beside(pair.target))
    assert [(Path(each.name).name, each.fits) for each in found] == [
        ("draft.gguf", True),
        ("stranger.gguf", False),
    ]
    assert found[0].name == str(pair.draft)
    assert 0 < found[0].share < 0.5
    assert "vocabulary sizes differ" in found[1].notes[0]


def test_one_file_under_two_names_is_one_draft(pair: CalibratedPair) -> None:
    """The first name counts."""
    twice = [("first", pair.draft), ("second", pair.draft)]
    assert [each.name for each in find_drafts(read_facts(pair.target), twice)] == ["first"]


def test_what_is_nearly_as_large_as_the_target_is_not_looked_at(pair: CalibratedPair) -> None:
    """It could not be worth its time."""
    facts = read_facts(pair.draft)
    assert find_drafts(facts, [("target", pair.target)]) == ()


def test_a_folder_that_is_not_there_has_no_files(tmp_path: Path) -> None:
    """Nor does it raise."""
    assert list(files_beside(tmp_path / "gone" / "m.gguf")) == []
