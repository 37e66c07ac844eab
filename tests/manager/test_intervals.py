"""Intervals are checked together, and shrink together."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from fairlane.errors import InvalidInput
from fairlane.model.intervals import Intervals


def test_the_defaults_are_the_promised_ones() -> None:
    assert msgspec.structs.asdict(Intervals()) == {
        "heartbeat": 5.0,
        "lease": 15.0,
        "poll": 1.0,
        "rescue": 2.0,
        "promote": 1.0,
        "admit": 1.0,
        "schedule": 1.0,
        "prune": 10.0,
        "leader_lease": 10.0,
        "leader_renew": 3.0,
        "stand": 2.0,
        "caution": 10.0,
        "clock_slack": 2.0,
        "trust_margin": 1.0,
        "loop_lag": 1.0,
        "unknown_task": 86_400.0,
    }


@pytest.mark.parametrize("field", Intervals.__struct_fields__)
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "5", None, True])
def test_what_is_no_positive_duration_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match=rf"\b{field}: "):
        Intervals(**{field: value})


def test_all_problems_are_reported_together() -> None:
    with pytest.raises(InvalidInput) as told:
        Intervals(poll=0.0, rescue=-1.0, lease=math.inf)

    assert all(f"{field}: " in str(told.value) for field in ("poll", "rescue", "lease"))


def test_leases_must_leave_room_for_their_renewal_and_both_are_reported() -> None:
    with pytest.raises(InvalidInput) as told:
        Intervals(heartbeat=14.0, leader_renew=9.0)

    assert "heartbeat: 14 s must be less than lease - trust_margin, which is 14 s" in str(told.value)
    assert "leader_renew: 9 s must be less than leader_lease - trust_margin, which is 9 s" in str(told.value)


def test_scaling_multiplies_every_interval() -> None:
    scaled = Intervals().scaled(0.1)

    assert scaled.lease == pytest.approx(1.5)
    assert {
        field: pytest.approx(getattr(Intervals(), field) * 0.1) for field in Intervals.__struct_fields__
    } == msgspec.structs.asdict(scaled)


def test_scaling_to_nothing_is_refused() -> None:
    with pytest.raises(InvalidInput):
        Intervals().scaled(0.0)
