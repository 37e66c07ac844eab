"""Random sequences of calls on a store, compared with the model after every step."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.sizes import sized

from .conftest import Opener
from .machine import machine_of

EXAMPLES = sized(15, 300)
STEPS = 40


# No time limit: a failure is worth the minutes that finding its shortest run of calls takes.
@pytest.mark.timeout(0)
def test_every_run_of_verbs_goes_as_the_model_says(opener: Opener) -> None:
    run_state_machine_as_test(
        machine_of(opener),
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
