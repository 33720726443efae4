"""How a lane's real steps are found from requests that were replayed as well."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from specproxy.strategies.calibration import VerifyScale


@pytest.mark.parametrize(("stretch", "offset"), [(0.3, 0.0), (1.0, 0.1), (2.5, -0.05)])
def test_stretch_and_offset_are_found(stretch: float, offset: float) -> None:
    """From requests whose share of verifying differs, through noise; then the correction holds for any."""
    scale, rng = VerifyScale(), np.random.default_rng(2)
    for _ in range(300):
        share = float(rng.uniform(0.0, 0.7))
        truth = math.log(1.0 + (stretch - 1.0) * share) + offset
        scale.learn(truth + 0.05 * float(rng.standard_normal()), share, 0.05**2)
    for share in (0.0, 0.2, 0.6):
        mean, variance = scale.correction(share)
        assert mean == pytest.approx(math.log(1.0 + (stretch - 1.0) * share) + offset, abs=0.04)
        assert 0.0 <= variance < 0.03**2


def test_at_first_nothing_is_corrected_and_little_is_sure() -> None:
    mean, variance = VerifyScale().correction(0.5)
    assert (mean, math.sqrt(variance) > 0.2) == (0.0, True)


def test_old_comparisons_fade() -> None:
    """A machine whose steps have become dearer is followed."""
    scale = VerifyScale()
    for excess in (0.0, 0.3):
        for _ in range(400):
            scale.learn(excess, 0.5, 0.05**2)
    assert scale.correction(0.5)[0] == pytest.approx(0.3, abs=0.05)


def test_one_wild_request_is_bounded() -> None:
    scale = VerifyScale()
    scale.learn(50.0, 0.5, 0.05**2)
    assert abs(scale.correction(0.5)[0]) < 1.2


def test_state_survives() -> None:
    scale = VerifyScale()
    scale.learn(0.2, 0.5, 0.01)
    again = VerifyScale.restored(json.loads(json.dumps(scale.dump())))
    assert again == scale
