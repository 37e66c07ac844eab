"""A `NewJob` that exists is valid: everything else is refused while it is made, naming the field."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.model.job import MOST_RETRIES, CronSlot, JobKind, NewJob, Priority
from fairlane.model.names import ERROR_BYTES, LONGEST_SECONDS, PAYLOAD_BYTES
from fairlane.model.retry import Backoff
from tests.model import bad_values as bad
from tests.model.bad_values import refused_field, short


def new(**fields: Any) -> NewJob:
    return NewJob(**{"id": "a-1", "task": "render", **fields})


def optional(values: list[Any]) -> list[Any]:
    """The bad values of a field that may be left out with None."""
    return [value for value in values if value is not None]


REFUSED: dict[str, list[Any]] = {
    "id": bad.NOT_KEYS,
    "task": bad.NOT_NAMES,
    "queue": bad.NOT_NAMES,
    "pool": bad.NOT_NAMES,
    "payload": [*bad.NOT_JSON, b'"' + b"x" * (PAYLOAD_BYTES - 1) + b'"'],
    "headers": [*optional(bad.NOT_JSON), b'"' + b"x" * (ERROR_BYTES - 1) + b'"'],
    "lane": optional(bad.NOT_KEYS),
    "sticky": optional(bad.NOT_KEYS),
    "unique": optional(bad.NOT_KEYS),
    "retry_of": optional(bad.NOT_KEYS),
    "priority": [None, "high", "urgent", 0, 1, 3, True, JobKind.JOB],
    "cost": bad.NOT_FACTORS,
    "delay": bad.NOT_DURATIONS,
    "run_at": optional(bad.NOT_INSTANTS),
    "expires": optional(bad.NOT_DURATIONS),
    "timeout": [*optional(bad.NOT_DURATIONS), 0],
    "retries": [*bad.NOT_WHOLE, -1, MOST_RETRIES + 1],
    "worker": [*optional(bad.NOT_WHOLE), -1, 2**31],
    "ttl": bad.NOT_DURATIONS,
    "backoff": [None, 1.0, {"base": 1}, Backoff],
    "kind": [None, "job", "turn", "nonsense", 1],
    "cron": ["nightly", ("nightly", 0.0), {"schedule": "nightly", "slot": 0.0}],
}


@pytest.mark.parametrize(
    ("field", "value"),
    [pytest.param(field, value, id=f"{field}-{short(value)}") for field in REFUSED for value in REFUSED[field]],
)
def test_a_bad_value_is_refused_and_the_refusal_names_its_field(field: str, value: Any) -> None:
    assert refused_field(new, **{field: value}) == field


@pytest.mark.parametrize("value", optional(bad.NOT_DURATIONS), ids=short)
def test_a_bad_time_of_uniqueness_is_refused(value: Any) -> None:
    assert refused_field(new, unique="once", unique_for=value) == "unique_for"


@pytest.mark.parametrize("value", bad.NOT_NAMES, ids=short)
def test_a_cron_slot_of_no_schedule_is_refused(value: Any) -> None:
    assert refused_field(CronSlot, value, 0.0) == "schedule"


@pytest.mark.parametrize("value", bad.NOT_INSTANTS, ids=short)
def test_a_cron_slot_at_no_moment_is_refused(value: Any) -> None:
    assert refused_field(CronSlot, "nightly", value) == "slot"


@pytest.mark.parametrize("value", optional(bad.NOT_KEYS), ids=short)
def test_a_bad_waiter_is_refused(value: Any) -> None:
    assert refused_field(new, kind=JobKind.TURN, lane="flux", waiter=value) == "waiter"


@pytest.mark.parametrize("value", bad.NOT_DURATIONS, ids=short)
def test_a_bad_time_to_join_a_broadcast_is_refused(value: Any) -> None:
    assert refused_field(new, kind=JobKind.BROADCAST, ttl=value) == "ttl"


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("run_at", {"delay": 1.0, "run_at": 5.0}),
        ("unique_for", {"unique_for": 5.0}),
        ("worker", {"worker": 2, "sticky": "plan-7"}),
        ("worker", {"worker": 0, "sticky": "plan-7"}),
        ("waiter", {"waiter": "session-1"}),
        ("ttl", {"ttl": 5.0}),
        ("waiter", {"kind": JobKind.TURN, "lane": "flux"}),
        ("lane", {"kind": JobKind.TURN, "waiter": "session-1"}),
        ("sticky", {"kind": JobKind.TURN, "waiter": "session-1", "lane": "flux", "sticky": "plan-7"}),
        ("sticky", {"kind": JobKind.TURN, "waiter": "session-1", "lane": "flux", "worker": 2}),
        ("delay", {"kind": JobKind.TURN, "waiter": "session-1", "lane": "flux", "delay": 1.0}),
        ("delay", {"kind": JobKind.TURN, "waiter": "session-1", "lane": "flux", "run_at": 1.0}),
        ("ttl", {"kind": JobKind.TURN, "waiter": "session-1", "lane": "flux", "ttl": 1.0}),
        ("waiter", {"kind": JobKind.BROADCAST, "waiter": "session-1"}),
        ("lane", {"kind": JobKind.BROADCAST, "lane": "flux"}),
        ("sticky", {"kind": JobKind.BROADCAST, "sticky": "plan-7"}),
        ("sticky", {"kind": JobKind.BROADCAST, "worker": 2}),
        ("delay", {"kind": JobKind.BROADCAST, "delay": 1.0}),
        ("delay", {"kind": JobKind.BROADCAST, "run_at": 1.0}),
        ("waiter", {"kind": JobKind.CLEANUP, "waiter": "session-1"}),
        ("ttl", {"kind": JobKind.CLEANUP, "ttl": 1.0}),
        ("cleanup", {"kind": JobKind.CLEANUP, "lane": "flux"}),
        ("cleanup", {"kind": JobKind.CLEANUP, "sticky": "plan-7"}),
        ("cleanup", {"kind": JobKind.CLEANUP, "worker": 2}),
        ("cleanup", {"kind": JobKind.CLEANUP, "delay": 1.0}),
        ("cleanup", {"kind": JobKind.CLEANUP, "run_at": 1.0}),
    ],
    ids=str,
)
def test_fields_that_contradict_each_other_are_refused(field: str, fields: dict[str, Any]) -> None:
    assert refused_field(new, **fields) == field


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"kind": JobKind.TURN, "waiter": "session-1", "lane": "flux"},
        {"kind": JobKind.BROADCAST},
        {"kind": JobKind.BROADCAST, "ttl": 60.0},
        {"kind": JobKind.CLEANUP},
        {"cron": CronSlot("nightly", 1_700_000_000.0)},
        {"payload": b'"' + b"x" * (PAYLOAD_BYTES - 2) + b'"'},
        {"headers": b'"' + b"x" * (ERROR_BYTES - 2) + b'"'},
        {"payload": '[["ä😀"],{}]'.encode()},
        {"retries": 0},
        {"retries": MOST_RETRIES},
        {"worker": 0},
        {"expires": 0.0},
        {"run_at": 0.0},
        {"unique": "once", "unique_for": 0},
        {"delay": LONGEST_SECONDS},
    ],
    ids=short,
)
def test_what_lies_on_the_edge_of_the_rules_is_taken(fields: dict[str, Any]) -> None:
    job = new(**fields)
    assert {name: getattr(job, name) for name in fields} == fields


@given(
    id=bad.keys,
    task=bad.names,
    queue=bad.names,
    lane=st.none() | bad.keys,
    sticky=st.none() | bad.keys,
    unique=st.none() | bad.keys,
    priority=st.sampled_from(Priority),
    cost=st.floats(0.01, 100),
    delay=st.floats(0, LONGEST_SECONDS),
    expires=st.none() | st.floats(0, LONGEST_SECONDS),
    timeout=st.none() | st.floats(0.001, LONGEST_SECONDS),
    retries=st.integers(0, MOST_RETRIES),
)
def test_every_job_within_the_rules_is_taken_as_it_is(**fields: Any) -> None:
    job = new(**fields)
    assert {name: getattr(job, name) for name in fields} == fields


def test_a_refusal_never_shows_the_payload() -> None:
    secret = b'["password", '
    with pytest.raises(ValueError, match=r"^payload: ") as caught:
        new(payload=secret)
    assert "password" not in str(caught.value)
