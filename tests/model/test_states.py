"""The state machine: its table as a whole, and what each constructor of a move makes and refuses."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.model import states
from fairlane.model.job import CANCELLED_REASONS, FAILED_REASONS, FINAL_STATES, Held, JobState, Reason
from fairlane.model.listings import error_line
from fairlane.model.names import ERROR_BYTES, RESULT_BYTES
from fairlane.model.retry import Backoff
from fairlane.model.states import HOLDER_MOVES, MOVES, Move, Transition
from tests.model import bad_values as bad
from tests.model.bad_values import refused_field, short

HELD = Held("a-1", 3)
NON_FINAL = frozenset(JobState) - FINAL_STATES
draws = st.floats(0, 1, exclude_max=True)
# One to four bytes a character, and what a store or an encoder could choke on; long by repetition.
pieces = st.text(st.sampled_from("aä€😀\0\n\ud800"), min_size=1, max_size=9)
error_texts = st.builds(
    lambda head, piece, tail, size: head + piece * (size // len(piece)) + tail,
    pieces,
    pieces,
    pieces,
    st.integers(ERROR_BYTES // 4 - 40, ERROR_BYTES + 40),
)


def targets_of(state: JobState) -> set[JobState]:
    return {target for sources, targets in MOVES.values() if state in sources for target in targets}


def test_the_table_has_every_move() -> None:
    assert set(MOVES) == set(Move)


@pytest.mark.parametrize("state", sorted(FINAL_STATES))
def test_a_final_state_has_no_way_out(state: JobState) -> None:
    assert not targets_of(state)


@pytest.mark.parametrize("state", sorted(NON_FINAL))
def test_every_other_state_has_a_way_to_each_final_one(state: JobState) -> None:
    reached = {state}
    while more := {target for known in reached for target in targets_of(known)} - reached:
        reached |= more
    assert reached >= FINAL_STATES


@pytest.mark.parametrize("state", JobState)
def test_every_state_can_be_reached_from_nothing(state: JobState) -> None:
    reached = set(MOVES[Move.ENQUEUE][1])
    while more := {target for known in reached for target in targets_of(known)} - reached:
        reached |= more
    assert state in reached


def test_only_enqueueing_makes_a_job() -> None:
    assert {move for move, (sources, _) in MOVES.items() if None in sources} == {Move.ENQUEUE}
    assert MOVES[Move.ENQUEUE][0] == {None}
    assert not MOVES[Move.ENQUEUE][1] & FINAL_STATES


def test_every_non_final_state_can_be_cancelled() -> None:
    sources, targets = MOVES[Move.CANCEL]
    assert sources == NON_FINAL
    assert targets == {JobState.CANCELLED}


def test_a_holder_moves_only_what_runs() -> None:
    for move in HOLDER_MOVES:
        assert JobState.RUNNING in MOVES[move][0], move


@pytest.mark.parametrize("move", [Move.HAND_BACK, Move.TAKE_BACK, Move.SNOOZE, Move.DECLINE])
def test_uncharged_moves_leave_running_and_only_hand_backs_and_declines_can_fail_a_job(move: Move) -> None:
    sources, targets = MOVES[move]
    assert sources == {JobState.RUNNING}
    # A hand-back fails a job only when it is one too many, and so is charged.
    assert targets & FINAL_STATES == ({JobState.FAILED} if move in (Move.HAND_BACK, Move.DECLINE) else set())


def test_outcomes_in_the_history_are_distinct() -> None:
    assert len({move.value for move in Move}) == len(Move)


@pytest.mark.parametrize("move", sorted(set(Move) - HOLDER_MOVES))
def test_a_holder_cannot_ask_for_the_moves_of_store_and_manager(move: Move) -> None:
    assert refused_field(Transition, held=HELD, move=move) == "move"


MADE: list[tuple[Move, Callable[[], Transition]]] = [
    (Move.COMPLETE, lambda: states.complete(HELD, b"1")),
    (Move.FAIL, lambda: states.fail(HELD, Reason.ERROR, "boom")),
    (Move.RETRY, lambda: states.retry(HELD, 2.0, Reason.ERROR, "boom")),
    (Move.SNOOZE, lambda: states.snooze(HELD, 2.0)),
    (Move.HAND_BACK, lambda: states.hand_back(HELD)),
    (Move.TAKE_BACK, lambda: states.take_back(HELD, 2.0)),
    (Move.CANCEL, lambda: states.cancel(HELD)),
    (Move.DECLINE, lambda: states.decline(HELD, "no such task")),
]


def test_a_decline_says_why_and_how_long_it_may_go_on() -> None:
    declined = states.decline(HELD, "no such task", patience=5)
    assert (declined.reason, declined.error, declined.error_group, declined.delay) == (
        Reason.UNKNOWN_TASK,
        "no such task",
        "unknown_task",
        5,
    )
    assert states.decline(HELD, "x").delay == 86_400
    assert refused_field(states.decline, HELD, "x", patience=-1) == "patience"
    assert [states.decline_delay(waited) for waited in (0, 1, 10, 1_000)] == [0.25, 0.5, 5, 15]


def test_every_move_of_a_holder_has_a_constructor() -> None:
    assert {move for move, _ in MADE} == HOLDER_MOVES


@pytest.mark.parametrize(("move", "make"), MADE, ids=[move.name for move, _ in MADE])
def test_a_constructor_makes_its_move_for_the_claim_it_was_given(move: Move, make: Callable[[], Transition]) -> None:
    transition = make()
    assert (transition.move, transition.held) == (move, HELD)


@pytest.mark.parametrize("reason", Reason)
def test_only_a_reason_to_fail_fails_or_retries(reason: Reason) -> None:
    if reason in FAILED_REASONS:
        assert states.fail(HELD, reason, "boom").reason is reason
        assert states.retry(HELD, 1.0, reason, "boom").reason is reason
    else:
        assert refused_field(states.fail, HELD, reason, "boom") == "reason"
        assert refused_field(states.retry, HELD, 1.0, reason, "boom") == "reason"


@pytest.mark.parametrize("reason", Reason)
def test_only_a_reason_to_cancel_cancels(reason: Reason) -> None:
    if reason in CANCELLED_REASONS:
        assert states.cancel(HELD, reason).reason is reason
    else:
        assert refused_field(states.cancel, HELD, reason) == "reason"


@pytest.mark.parametrize("delay", bad.NOT_DURATIONS, ids=short)
def test_a_retry_or_snooze_after_no_duration_is_refused(delay: Any) -> None:
    assert refused_field(states.retry, HELD, delay, Reason.ERROR, "boom") == "delay"
    assert refused_field(states.snooze, HELD, delay) == "delay"


def test_a_result_is_kept_up_to_its_size_and_not_a_byte_more() -> None:
    assert states.complete(HELD, b"1" * RESULT_BYTES).result == b"1" * RESULT_BYTES
    assert states.complete(HELD).result is None
    assert refused_field(states.complete, HELD, b"1" * (RESULT_BYTES + 1)) == "result"


@given(st.text(st.characters(), max_size=200))
def test_a_short_error_is_kept_but_for_what_no_store_can_hold(error: str) -> None:
    kept = states.fail(HELD, Reason.ERROR, error).error
    assert kept is not None
    assert len(kept) == len(error)
    for before, after in zip(error, kept, strict=True):
        if before == "\0":
            assert after == "\N{REPLACEMENT CHARACTER}"
        elif "\ud800" <= before <= "\udfff":
            assert after == "?"
        else:
            assert after == before


@given(error_texts)
def test_a_long_error_is_cut_between_characters_and_fits(error: str) -> None:
    for transition in (
        states.fail(HELD, Reason.ERROR, error),
        states.retry(HELD, 1.0, Reason.ERROR, error),
    ):
        kept = transition.error
        assert kept is not None
        assert len(kept.encode()) <= ERROR_BYTES
        whole = error.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()
        if len(whole.encode()) <= ERROR_BYTES:
            assert kept == whole
        else:
            head, _, tail = kept.partition("…")
            assert whole.startswith(head)
            assert whole.endswith(tail)
            # Nothing more than a part of one character is lost on each side of the cut.
            assert len(kept.encode()) > ERROR_BYTES - 7


def test_a_cut_error_keeps_its_end_where_the_cause_stands() -> None:
    kept = states.fail(HELD, Reason.ERROR, "x" * ERROR_BYTES + "ValueError: boom").error
    assert kept is not None
    assert kept.endswith("ValueError: boom")


def test_an_error_with_a_huge_message_keeps_its_class() -> None:
    kept = states.fail(HELD, Reason.ERROR, "Traceback …\n  frames\nValueError: " + "x" * 1_000_000).error
    assert (error_line(kept) or "").startswith("ValueError: xxx")
    assert len(error_line(kept) or "") == 500


@given(st.text(st.characters()), st.sampled_from(sorted(FAILED_REASONS)))
def test_an_error_group_is_short_printable_text_and_never_empty(group: str, reason: Reason) -> None:
    kept = states.fail(HELD, reason, "boom", group=group).error_group
    assert kept
    assert len(kept) <= 120
    assert kept.isprintable()
    kept.encode()


def test_an_error_group_is_cut_to_a_hundred_and_twenty_characters() -> None:
    assert states.fail(HELD, Reason.ERROR, "boom", group="ValueError: " + "x" * 500).error_group == (
        "ValueError: " + "x" * 108
    )


def test_without_a_group_errors_are_grouped_by_their_reason() -> None:
    assert states.fail(HELD, Reason.TIMEOUT, "boom").error_group == "timeout"
    assert states.retry(HELD, 1.0, Reason.TIMEOUT, "boom", group="").error_group == "timeout"


def after_error(attempt: int, retries: int, reason: Reason, draw: float = 0.5) -> Transition:
    return states.after_error(
        HELD, attempt=attempt, retries=retries, backoff=Backoff(), draw=draw, reason=reason, error="boom"
    )


@given(
    attempt=st.integers(1, 30),
    retries=st.integers(0, 30),
    reason=st.sampled_from(sorted(FAILED_REASONS - {Reason.BAD_PAYLOAD})),
    draw=draws,
)
def test_a_failed_attempt_is_retried_while_the_budget_lasts(
    attempt: int, retries: int, reason: Reason, draw: float
) -> None:
    transition = after_error(attempt, retries, reason, draw)
    assert transition.move is (Move.RETRY if attempt < retries + 1 else Move.FAIL)
    assert (transition.reason, transition.error) == (reason, "boom")
    if transition.move is Move.RETRY:
        assert transition.delay == Backoff().delay(attempt, draw)


def test_a_bad_payload_fails_at_once_whatever_the_budget() -> None:
    transition = after_error(1, 1_000, Reason.BAD_PAYLOAD)
    assert (transition.move, transition.reason) == (Move.FAIL, Reason.BAD_PAYLOAD)


def after_crash(*, attempt: int = 1, retries: int = 3, crashes: int = 1, cancel: bool = False) -> states.Fate:
    return states.after_crash(
        cancel_requested=cancel,
        attempt=attempt,
        retries=retries,
        crashes=crashes,
        backoff=Backoff(base=10.0, jitter=False),
        draw=0.5,
    )


def test_after_its_first_crash_a_job_waits_for_nothing() -> None:
    assert after_crash() == states.Fate(JobState.PENDING)


def test_after_later_crashes_a_job_backs_off() -> None:
    assert after_crash(attempt=2, crashes=2) == states.Fate(JobState.SCHEDULED, delay=20.0)


def test_a_crash_of_the_last_attempt_is_the_end() -> None:
    assert after_crash(attempt=4) == states.Fate(JobState.FAILED, reason=Reason.CRASHED)
    assert after_crash(attempt=1, retries=0) == states.Fate(JobState.FAILED, reason=Reason.CRASHED)


def test_a_crash_fulfils_a_request_to_cancel_whatever_the_budget() -> None:
    for attempt in (1, 4):
        assert after_crash(attempt=attempt, cancel=True) == states.Fate(JobState.CANCELLED, reason=Reason.BY_USER)


@given(attempt=st.integers(1, 9), retries=st.integers(0, 9), crashes=st.integers(1, 9), cancel=st.booleans())
def test_every_fate_after_a_crash_is_a_legal_move(attempt: int, retries: int, crashes: int, cancel: bool) -> None:
    fate = after_crash(attempt=attempt, retries=retries, crashes=crashes, cancel=cancel)
    move = Move.CANCEL if cancel else Move.CRASH
    sources, targets = MOVES[move]
    assert JobState.RUNNING in sources
    assert fate.state in targets
    assert (fate.reason is not None) == fate.state.final
