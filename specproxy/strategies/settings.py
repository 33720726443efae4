"""What a user may set about learning."""

from __future__ import annotations

from dataclasses import dataclass, field

from specproxy.strategies.posterior import Scales

__all__ = ["LearnerSettings"]


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """Settings of the learner; the defaults were chosen by simulation.

    Args:
        allowance_requests: start-up loss allowed per workload, in requests' worth of plain time.
        allowance_share: further loss allowed, as a share of plain's time.
        allowance_loads: start-up loss allowed for loads that displace plain, in requests' worth of plain time.
        credit_requests: how much gained time may be lost again, in requests' worth.
        caution: standard deviations above the mean at which the gate looks at a lane.
        plain_first: requests on plain before anything else is tried.
        show_first: requests of a workload for which lanes that never ran are left out if they are expected to
            be slower there: what their steps take is better found out where they should win.
        proven: standard deviations by which a lane must lose to be disabled on a workload.
        retest_share: share of plain's time that may be spent on testing lanes that are out of use.
        retest_first: how many times that share may be spent on a lane that has lost its first tries only; it
            halves with every test that the lane loses.
        half_life: requests of a cell after which their weight has halved.
        hysteresis: a reload must save this many times what it costs.
        optimism: standard deviations below the mean at which loads look at lanes.
        dwell_requests: requests for which a loaded lane stays.
        dwell_loads: load times for which a loaded lane stays.
        scales: prior scales of the effects and of the noise.
    """

    allowance_requests: float = 1.0
    allowance_share: float = 0.02
    allowance_loads: float = 5.0
    credit_requests: float = 5.0
    caution: float = 1.25
    plain_first: int = 2
    show_first: float = 10.0
    proven: float = 2.33
    retest_share: float = 0.002
    retest_first: float = 4.0
    half_life: float = 200.0
    hysteresis: float = 1.2
    optimism: float = 0.8
    dwell_requests: float = 3.0
    dwell_loads: float = 1.0
    scales: Scales = field(default_factory=Scales)
