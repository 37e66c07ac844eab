"""Results and progress that sessions report for their jobs, fenced by (job, fence, session), and cancellation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ...errors import NotFound
from ...model.job import Acceptance, Held, JobKind, JobState, Reason, Verdict
from ...model.names import PAYLOAD_BYTES, check_size
from ...model.states import Move, Transition
from ..codes import ARRIVING, COMPLETED, FINAL_CODES, MOVE_CODES, MOVES, RUNNING, STATES
from ..shared.rows import readable_attempts
from ..wakeups import job_topic, session_topic
from . import broadcasts, endings, enqueue, lane_limits
from .records import ClaimHolder, JobRecord, StoredSession, encode_attempts, job_record_of, json_texts, reason_value
from .step import Step


def finish(step: Step, session_id: str, transitions: Sequence[Transition]) -> list[Verdict]:
    """Apply the transitions of a session. Plain jobs that just end are written together: the hot path."""
    session = StoredSession.find(step, session_id)
    holder = session.seq if session is not None and session.present else -1
    rows = _held_rows(step, [t.held.id for t in transitions])
    plain = _PlainEndings(step)
    verdicts = []
    for t in transitions:
        # Removed, so that a second transition of the same job in one call is judged by what the first one stored.
        row = rows.pop(t.held.id, None)
        if row is None or row[1] != holder or row[2] != t.held.fence:
            plain.write()
            verdicts.append(_judge(step, session_id, t.held, t.move))
        elif row[3] and (ending := _ending(t.move, row[4])) is not None:
            verdicts.append(plain.add(row, t, ending))
        else:
            plain.write()
            e = step.active_job(row[0]) or endings.restored(step, row[0])
            assert session is not None
            verdicts.append(Verdict(t.held.id, Acceptance.APPLIED, _apply(step, e, t, session.holder)))
    plain.write()
    return verdicts


def _held_rows(step: Step, ids: list[str]) -> dict[str, tuple[Any, ...]]:
    """Return rows of `held_rows` by job id."""
    seqs = step.queue_cache.seqs
    rows = _rows_by_seq(step, {seqs[id]: id for id in ids if id in seqs})
    missing = [id for id in ids if id not in rows]
    if missing:
        # Claimed by another process, final, or pruned and enqueued again under the same id.
        rows |= _rows_by_seq(step, {seq: id for id, seq in step.all("seqs_by_ids", json_texts(missing))})
    return rows


def _rows_by_seq(step: Step, wanted: dict[int, str]) -> dict[str, tuple[Any, ...]]:
    return {wanted[row[0]]: row for row in step.all("held_rows", msgspec.json.encode(list(wanted)).decode())}


SHORT_RESULT = 4_096
_FINAL = {Move.COMPLETE: JobState.COMPLETED, Move.FAIL: JobState.FAILED, Move.CANCEL: JobState.CANCELLED}
# Compared by identity below: hashing an enum member, or reading it from its class, costs as much as binding a row.
_COMPLETE, _FAIL, _CANCEL, _APPLIED = Move.COMPLETE, Move.FAIL, Move.CANCEL, Acceptance.APPLIED
_ENDINGS = [(FINAL_CODES[_FINAL[move]], MOVE_CODES[move], _FINAL[move]) for move in _FINAL]
_ENDED_COMPLETE, _ENDED_FAIL, _ENDED_CANCEL = _ENDINGS


def _ending(move: Move, cancel: int) -> tuple[int, int, JobState] | None:
    """Return how a move ends a plain job: the codes of state and move, and the state. None if it does not just end."""
    if move is _COMPLETE:
        return _ENDED_COMPLETE
    if cancel:
        return None
    if move is _FAIL:
        return _ENDED_FAIL
    return _ENDED_CANCEL if move is _CANCEL else None


def _short_text(result: bytes | None) -> bool:
    """Return whether a result can be passed as JSON text together with others, unchanged."""
    return result is None or (len(result) <= SHORT_RESULT and result.isascii() and b"\0" not in result)


class _PlainEndings:
    """Plain jobs that end, written together."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.completed: dict[str, str | None] = {}
        self.outcomes: list[tuple[Any, ...]] = []
        self.gone: list[int] = []
        self.lanes: dict[int, int] = {}
        self.counts: dict[tuple[int, int, int], int] = {}

    def add(self, row: tuple[Any, ...], t: Transition, ending: tuple[int, int, JobState]) -> Verdict:
        seq, session, fence, _, _, queue, class_, lane, granted, arrival, attempt, started_at, refused = row
        id = t.held.id
        code, move, state = ending
        if code == COMPLETED and not refused and _short_text(t.result):
            self.completed[str(seq)] = None if t.result is None else t.result.decode()
        else:
            self.outcomes.append(
                (
                    seq, queue, code, reason_value(t.reason), t.result, t.error, t.error_group, session,
                    move, arrival, attempt, fence, started_at, self.step.now, refused,
                    self.step.next_ending(code),
                )
            )  # fmt: skip
        self.gone.append(seq)
        if lane is not None:
            self.lanes[lane] = self.lanes.get(lane, 0) + granted
        count = (queue, class_, code)
        self.counts[count] = self.counts.get(count, 0) + 1
        self.step.topics.add("job:" + id)
        self.step.queue_cache.seqs.pop(id, None)
        return Verdict(id, _APPLIED, state)

    def write(self) -> None:
        """Write the rows first: the next job of a lane is looked up among the remaining ones."""
        if not self.gone:
            return
        step = self.step
        if self.completed:
            step.run("outcome_complete", msgspec.json.encode(self.completed).decode(), _ENDED_COMPLETE[1], step.now)
        step.many("outcome_insert", self.outcomes)
        step.run("active_job_delete_all", msgspec.json.encode(self.gone).decode())
        for (queue, class_, code), count in self.counts.items():
            endings.count_final(step, queue, class_, RUNNING, code, count)
        if self.lanes:
            lane_limits.grant_freed_places(step, self.lanes)
        self.completed, self.outcomes, self.gone, self.lanes, self.counts = {}, [], [], {}, {}


def _apply(step: Step, e: JobRecord, t: Transition, holder: ClaimHolder) -> JobState:
    """Apply a transition; if a cancel was requested, any move but a completion cancels the job."""
    move, reason = t.move, t.reason
    if e.cancel and move is not Move.COMPLETE:
        move, reason = Move.CANCEL, Reason.BY_USER
    elif e.kind == JobKind.TURN and move is Move.RETRY:
        move = Move.FAIL
    elif e.kind == JobKind.TURN and move in (Move.SNOOZE, Move.HAND_BACK, Move.TAKE_BACK, Move.DECLINE):
        move, reason = Move.CANCEL, Reason.BY_USER
    if move is Move.HAND_BACK:
        return endings.hand_back(step, e, holder)
    if move is Move.TAKE_BACK:
        return endings.take_back(step, e, holder, delay=t.delay)
    if move is Move.DECLINE:
        return endings.decline(step, e, holder, t)
    if move in (Move.RETRY, Move.SNOOZE):
        state = JobState.SCHEDULED if t.delay > 0 else JobState.PENDING
        endings.record(step, e, holder, move.value, state, reason, t.error)
        if move is Move.SNOOZE:
            e.attempt -= 1
        if t.payload is not None:
            enqueue.replace_payload(step, e.seq, t.payload)
        endings.reschedule(step, e, t.delay, crashed=reason is Reason.CRASHED)
        return state
    state = _FINAL[move]
    endings.end(step, e, state, reason, result=t.result, error=t.error, group=t.error_group, move=move)
    return state


def _judge(step: Step, session: str, held: Held, move: Move | None) -> Verdict:
    """Judge a write by a session that does not hold the job: it is repeated or stale."""
    row = step.one("job_for_judgement", json_texts([held.id]))
    if row is None:
        return Verdict(held.id, Acceptance.STALE, None)
    seq, final, live_state, live_fence, raw, last_fence, last_move, last_session = row
    state = STATES[live_state if final is None else final]
    if last_fence == held.fence and last_move is not None:
        if last_session == session and _same(move, MOVES[last_move].value):
            return Verdict(held.id, Acceptance.REPEATED, state)
        step.run("outcome_refused", seq)
        return Verdict(held.id, Acceptance.STALE, state)
    attempts = readable_attempts(raw)
    for position, attempt in enumerate(attempts):
        if attempt.fence != held.fence:
            continue
        if attempt.session == session and _same(move, attempt.outcome):
            return Verdict(held.id, Acceptance.REPEATED, attempt.state)
        attempts[position] = msgspec.structs.replace(attempt, refused=attempt.refused + 1)
        step.run("job_attempts", encode_attempts(attempts), seq)
        return Verdict(held.id, Acceptance.STALE, state)
    if live_fence == held.fence:
        step.run("active_job_refused", seq)
    return Verdict(held.id, Acceptance.STALE, state)


def _same(move: Move | None, outcome: str | None) -> bool:
    """Return whether a write repeats the one that ended a claim, which a requested cancel may have replaced."""
    if move is None:
        return False
    return outcome == move.value or (outcome == Move.CANCEL.value and move is not Move.COMPLETE)


def progress(step: Step, session_id: str, reports: Sequence[tuple[Held, bytes]]) -> list[Verdict]:
    """Store the latest progress of running jobs."""
    for _, value in reports:
        check_size("progress", value, PAYLOAD_BYTES)
    session = StoredSession.find(step, session_id)
    holder = session.seq if session is not None and session.present else -1
    ids = json_texts(held.id for held, _ in reports)
    records = {row[26]: job_record_of(row) for row in step.all("records_by_ids", ids)}
    verdicts = []
    for held, value in reports:
        e = records.get(held.id)
        if e is not None and e.session == holder and e.fence == held.fence:
            step.run("job_progress", value, e.seq)
            step.topics.add(job_topic(e.id))
            verdicts.append(Verdict(held.id, Acceptance.APPLIED, JobState.RUNNING))
        else:
            verdicts.append(_judge(step, session_id, held, None))
    return verdicts


def cancel(step: Step, ids: Sequence[str]) -> list[JobState]:
    """Cancel jobs; none is cancelled if one of them is unknown."""
    kinds = {id: kind for id, kind, _ in step.all("job_states", json_texts(ids))}
    for id in ids:
        if id not in kinds:
            raise NotFound(f"there is no job {id!r}")
    # The end of another job would grant its place of a lane to a turn that waits for it, which would start at once.
    turns_first = sorted(ids, key=lambda id: kinds[id] != JobKind.TURN)
    states = {id: _cancel_one(step, id) for id in turns_first}
    return [states[id] for id in ids]


def _cancel_one(step: Step, id: str) -> JobState:
    row = step.one("record_by_id", id)
    if row is None:
        [(_, _, state)] = step.all("job_states", json_texts([id]))
        return STATES[state]
    return cancel_job(step, job_record_of(row))


def cancel_job(step: Step, e: JobRecord) -> JobState:
    """Cancel an active job: at once while it waits, by request while it runs."""
    if e.state == ARRIVING:
        enqueue.admit_arriving(step, e)
    if e.state != RUNNING:
        endings.end(step, e, JobState.CANCELLED, Reason.BY_USER)
        return JobState.CANCELLED
    if e.kind == JobKind.BROADCAST:
        return broadcasts.cancel(step, e, cancel_job, endings.end)
    if not e.cancel:
        e.cancel = 1
        step.run("active_job_cancel", e.seq)
        row = step.one("session_id", e.session)
        if row is not None:
            step.topics.add(session_topic(row[0]))
        step.topics.add(job_topic(e.id))
    return JobState.RUNNING
