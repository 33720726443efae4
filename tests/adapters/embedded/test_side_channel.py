"""The side channel's wire form: everything comes back, newer versions are read, nonsense is refused."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specproxy.adapters.embedded.side_channel import decode_priors, decode_report, encode_priors, encode_report
from specproxy.records import DrafterReport, EnginePriors, EngineReport

ASCII = st.text(st.characters(codec="ascii"), max_size=20)
COUNT = st.integers(0, 2**40)
REAL = st.floats(0, 1e12, allow_nan=False)
PAIRS = st.lists(st.tuples(REAL, REAL), max_size=4).map(tuple)
COUNTS = st.lists(st.tuples(COUNT, COUNT), max_size=4).map(tuple)
LEVELS = st.lists(REAL, max_size=4).map(tuple)
PRIORS = st.builds(
    EnginePriors, ASCII, ASCII, st.dictionaries(ASCII, PAIRS, max_size=3), PAIRS,
    st.dictionaries(ASCII, LEVELS, max_size=3), REAL, st.dictionaries(ASCII, REAL, max_size=3),
)  # fmt: skip
DRAFTER = st.builds(DrafterReport, st.text(), COUNT, COUNT, COUNT, COUNTS, COUNTS, REAL, LEVELS)
REPORTS = st.builds(
    EngineReport, st.text(), st.text(), COUNT, st.lists(DRAFTER, max_size=3).map(tuple),
    st.dictionaries(st.integers(1, 64), st.tuples(COUNT, REAL), max_size=3),
    st.lists(COUNT, max_size=9).map(tuple), st.lists(COUNT, max_size=9).map(tuple), st.text(),
    st.dictionaries(st.text(), COUNT, max_size=3).map(lambda steps: tuple(steps.items())),
)  # fmt: skip


@given(PRIORS)
def test_priors_come_back_from_a_header(priors: EnginePriors) -> None:
    header = encode_priors(priors)
    assert header.isascii()
    assert not set(header) & set(b"\r\n")
    assert decode_priors(header) == priors


@given(REPORTS)
def test_reports_come_back(report: EngineReport) -> None:
    assert decode_report(encode_report(report)) == report


def test_names_beyond_ascii_do_not_break_the_header() -> None:
    assert encode_priors(EnginePriors("ü", "código")).isascii()


def test_a_newer_version_is_read_as_far_as_it_is_known() -> None:
    data = {
        "v": 9, "id": "r", "strategy": "auto", "steps": 2.0, "new": {"x": 1},
        "drafters": [{"name": "mtp", "drafted": 3, "accepted": 2, "by_position": [[3, 2, "more"]], "x": []}],
        "widths": {"4": [2, 0.5, "more"]}, "plans": {"mtp:3": 2.0},
    }  # fmt: skip
    report = decode_report(orjson.dumps(data))
    assert report.version == 9
    assert report.widths == {4: (2, 0.5)}
    assert report.plans == (("mtp:3", 2),)
    assert report.drafters == (DrafterReport("mtp", 0, 3, 2, ((3, 2),)),)
    assert decode_priors(b'{"v":9,"id":"r","later":[]}') == EnginePriors("r", "", version=9)


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b'{"id":1}', b'{"acceptance":[]}', b'{"acceptance":{"ngram":[[1]]}}', b'{"match":[["a",1]]}',
     b'{"v":"1"}', b'{"acceptance":{"ngram":3}}', b'{"last_used":[]}', b'{"last_used":{"mtp":"x"}}'],
)  # fmt: skip
def test_nonsense_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - orjson and the reader word it differently
        decode_priors(data)


@pytest.mark.parametrize(
    "data", [b'{"widths":[]}', b'{"drafters":[1]}', b'{"widths":{"a":[1,2]}}', b'{"steps":true}']
)
def test_nonsensical_reports_too(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - as above
        decode_report(data)
