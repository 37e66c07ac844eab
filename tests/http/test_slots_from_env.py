"""Slots of an instance from the environment."""

from __future__ import annotations

import pytest

from fairlane import InvalidInput, Settings
from fairlane.http.instance import slots_from_env
from fairlane.model.slots import Reserved, Slots, usual_slots

USUAL = usual_slots(10)


@pytest.mark.parametrize(
    ("environ", "total", "high"),
    [
        ({}, 10, 1),
        ({"MAX_CONCURRENT_TASKS": "", "HIGH_PRIORITY_RESERVED": " "}, 10, 1),
        ({"MAX_CONCURRENT_TASKS": "3", "HIGH_PRIORITY_RESERVED": "1"}, 3, 1),
        ({"MAX_CONCURRENT_TASKS": "3", "HIGH_PRIORITY_RESERVED": "0"}, 3, 0),
        ({"MAX_CONCURRENT_TASKS": "3"}, 3, 0),
        ({"HIGH_PRIORITY_RESERVED": "4"}, 10, 4),
        ({"FAIRLANE_MAX_CONCURRENT_TASKS": "5", "MAX_CONCURRENT_TASKS": "3", "HIGH_PRIORITY_RESERVED": "2"}, 5, 2),
        ({"FAIRLANE_HIGH_PRIORITY_RESERVED": "12", "MAX_CONCURRENT_TASKS": "20"}, 20, 12),
    ],
)
def test_variables_are_read(environ: dict[str, str], total: int, high: int) -> None:
    assert slots_from_env(Settings.from_env(environ).slots, environ) == Slots(total=total, reserved=Reserved(high=high))


@pytest.mark.parametrize(
    ("environ", "field"),
    [
        ({"MAX_CONCURRENT_TASKS": "0"}, "MAX_CONCURRENT_TASKS"),
        ({"MAX_CONCURRENT_TASKS": "2.5"}, "MAX_CONCURRENT_TASKS"),
        ({"HIGH_PRIORITY_RESERVED": "-1"}, "HIGH_PRIORITY_RESERVED"),
        ({"MAX_CONCURRENT_TASKS": "3", "HIGH_PRIORITY_RESERVED": "3"}, "HIGH_PRIORITY_RESERVED"),
        ({"FAIRLANE_HIGH_PRIORITY_RESERVED": "3", "MAX_CONCURRENT_TASKS": "2"}, "FAIRLANE_HIGH_PRIORITY_RESERVED"),
    ],
)
def test_an_error_names_the_variable(environ: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        slots_from_env(USUAL, environ)
    assert refused.value.field == field
