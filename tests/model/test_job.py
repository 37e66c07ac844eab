"""The small words around a job: priorities, states, reasons, verdicts, and the request to run one again."""

from typing import Any

import msgspec
import pytest

from fairlane.model.job import (
    CANCELLED_REASONS,
    FAILED_REASONS,
    FINAL_STATES,
    WAITING_STATES,
    Acceptance,
    Claimed,
    Held,
    Job,
    JobKind,
    JobState,
    Priority,
    Reason,
    Verdict,
)
from fairlane.model.retry import Backoff
from tests.model.bad_values import refused_field, short

JOB = Job(
    id="a-1",
    task="render",
    queue="images",
    kind=JobKind.JOB,
    state=JobState.FAILED,
    reason=Reason.ERROR,
    lane="user:ann",
    priority=Priority.LOW,
    cost=2.0,
    payload=b'[["a cat"],{}]',
    headers=b'{"trace":"1"}',
    retries=5,
    backoff=Backoff(base=3.0),
    timeout=30.0,
    unique=None,
    pool="gpu",
    sticky=None,
    direct=None,
    worker="gpu/4",
    session="s-1",
    attempt=6,
    fence=6,
    arrival=17,
    retry_of=None,
    parent=None,
    enqueued_at=1_700_000_000.0,
    due_at=None,
    expires_at=None,
    started_at=1_700_000_001.0,
    finished_at=1_700_000_002.0,
    cancel_requested=False,
    suspect=False,
    progress=None,
    result=None,
    error="boom",
    error_group="error",
    attempts=(),
)


def test_the_higher_class_has_the_lower_number() -> None:
    assert sorted([Priority.LOW, Priority.HIGH, Priority.NORMAL]) == [
        Priority.HIGH,
        Priority.NORMAL,
        Priority.LOW,
    ]


@pytest.mark.parametrize("priority", Priority)
def test_a_priority_is_found_by_the_word_it_is_shown_as(priority: Priority) -> None:
    assert Priority.parse(priority.label) is priority
    assert Priority.parse(priority.label.upper()) is priority


@pytest.mark.parametrize(
    "word", ["", "urgent", "0", "1", " high", "x" * 10_000, "\ud800", None, 1, [], b"high"], ids=short
)
def test_an_unknown_priority_is_refused_with_the_words_there_are(word: Any) -> None:
    assert refused_field(Priority.parse, word) == "priority"
    with pytest.raises(ValueError, match=r"'high', 'normal' or 'low'"):
        Priority.parse(word)


def test_every_state_is_either_waiting_running_or_final() -> None:
    assert {*WAITING_STATES, JobState.RUNNING, *FINAL_STATES} == set(JobState)
    assert not WAITING_STATES & FINAL_STATES
    assert {state for state in JobState if state.final} == FINAL_STATES


def test_every_reason_is_one_to_fail_or_one_to_cancel() -> None:
    assert set(Reason) == FAILED_REASONS | CANCELLED_REASONS
    assert not FAILED_REASONS & CANCELLED_REASONS


@pytest.mark.parametrize(
    ("acceptance", "accepted"),
    [(Acceptance.APPLIED, True), (Acceptance.REPEATED, True), (Acceptance.STALE, False)],
)
def test_a_writer_may_believe_what_was_applied_now_or_before(acceptance: Acceptance, accepted: bool) -> None:
    assert Verdict("a-1", acceptance, JobState.COMPLETED).accepted is accepted


def test_a_claim_goes_by_job_and_fence() -> None:
    claimed = Claimed(
        id="a-1",
        fence=4,
        attempt=2,
        task="render",
        queue="images",
        lane=None,
        priority=Priority.HIGH,
        payload=b"[[],{}]",
        retries=3,
        backoff=Backoff(),
        timeout=None,
        kind=JobKind.JOB,
        sticky=None,
        suspect=False,
        limited=False,
        headers=None,
    )
    assert claimed.held == Held("a-1", 4)


def test_running_a_job_again_asks_for_the_same_under_a_new_id() -> None:
    again = JOB.as_new("b-2")
    assert (again.id, again.retry_of, again.kind) == ("b-2", "a-1", JobKind.JOB)
    for field in ("task", "queue", "payload", "lane", "priority", "cost", "headers", "retries", "backoff"):
        assert getattr(again, field) == getattr(JOB, field), field
    assert (again.timeout, again.pool) == (JOB.timeout, JOB.pool)
    assert (again.delay, again.run_at, again.worker) == (0.0, None, None)


def test_running_a_sticky_job_again_keeps_its_key_and_names_no_worker() -> None:
    again = msgspec.structs.replace(JOB, sticky="plan-7").as_new("b-2")
    assert (again.sticky, again.worker) == ("plan-7", None)


def test_running_a_copy_of_a_broadcast_again_goes_to_the_same_worker() -> None:
    again = msgspec.structs.replace(JOB, parent="p-1", lane=None, direct=4).as_new("b-2")
    assert (again.worker, again.pool) == (4, "gpu")


def test_running_a_broadcast_again_sends_it_again() -> None:
    again = msgspec.structs.replace(JOB, kind=JobKind.BROADCAST, lane=None, worker=None).as_new("b-2")
    assert again.kind is JobKind.BROADCAST


@pytest.mark.parametrize("kind", [JobKind.TURN, JobKind.CLEANUP])
def test_a_turn_or_a_clean_up_cannot_be_run_again(kind: JobKind) -> None:
    assert refused_field(lambda: msgspec.structs.replace(JOB, kind=kind).as_new("b-2")) == "id"


def test_a_job_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        JOB.state = JobState.PENDING  # type: ignore[misc]  # the mistake
