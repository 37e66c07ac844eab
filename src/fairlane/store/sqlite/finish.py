"""What sessions write about jobs they hold, fenced by (job, fence, session), and what users ask to be cancelled."""

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
from . import broadcasts, damage, endings, enqueue, lane_limits
from .job_record import Entry, encode_attempts, entry_of, reason_value
from .queue_cache import json_texts
from .sessions import Presence
from .step import Step


def finish(step: Step, session: str, transitions: Sequence[Transition]) -> list[Verdict]:
    """Apply what a session decided about its jobs. Plain jobs that simply end are written together: the hot path."""
    who = Presence.find(step, session)
    holder = who.seq if who is not None and who.present else -1
    rows = _held_rows(step, [t.held.id for t in transitions])
    ends = _Ends(step)
    verdicts = []
    for t in transitions:
        # Taken out, so that a second write for the same job in one call is judged by what the first has stored.
        row = rows.pop(t.held.id, None)
        if row is None or row[1] != holder or row[2] != t.held.fence:
            ends.write()
            verdicts.append(_judge(step, session, t.held, t.move))
        elif row[3] and (ending := _ending(t.move, row[4])) is not None:
            verdicts.append(ends.add(row, t, ending))
        else:
            ends.write()
            e = step.entry(row[0]) or damage.adopted(step, row[0])
            assert who is not None
            verdicts.append(Verdict(t.held.id, Acceptance.APPLIED, _apply(step, e, t, who)))
    ends.write()
    return verdicts


def _held_rows(step: Step, ids: list[str]) -> dict[str, tuple[Any, ...]]:
    """Live jobs by id, as the query `held_rows` has them."""
    seqs = step.catalog.seqs
    rows = _rows_by_seq(step, {seqs[id]: id for id in ids if id in seqs})
    missing = [id for id in ids if id not in rows]
    if missing:
        # Claimed through another process, or gone; or the id was forgotten and used again since.
        rows |= _rows_by_seq(step, {seq: id for id, seq in step.all("seqs_by_ids", json_texts(missing))})
    return rows


def _rows_by_seq(step: Step, wanted: dict[int, str]) -> dict[str, tuple[Any, ...]]:
    return {wanted[row[0]]: row for row in step.all("held_rows", msgspec.json.encode(list(wanted)).decode())}


SHORT_RESULT = 4_096
_FINAL = {Move.COMPLETE: JobState.COMPLETED, Move.FAIL: JobState.FAILED, Move.CANCEL: JobState.CANCELLED}
# Looked up by identity below: hashing an enum member, or reading one off its class, costs as much as binding a row.
_COMPLETE, _FAIL, _CANCEL, _APPLIED = Move.COMPLETE, Move.FAIL, Move.CANCEL, Acceptance.APPLIED
_ENDINGS = [(FINAL_CODES[_FINAL[move]], MOVE_CODES[move], _FINAL[move]) for move in _FINAL]
_ENDED_COMPLETE, _ENDED_FAIL, _ENDED_CANCEL = _ENDINGS


def _ending(move: Move, cancel: int) -> tuple[int, int, JobState] | None:
    """How a plain job simply ends by a move: the codes of its state and move, and the state. None when it does not."""
    if move is _COMPLETE:
        return _ENDED_COMPLETE
    if cancel:
        return None
    if move is _FAIL:
        return _ENDED_FAIL
    return _ENDED_CANCEL if move is _CANCEL else None


def _short_text(result: bytes | None) -> bool:
    """Whether a result can travel with others as JSON text and come out as it went in."""
    return result is None or (len(result) <= SHORT_RESULT and result.isascii() and b"\0" not in result)


class _Ends:
    """Plain jobs that end, to be written together."""

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
                )
            )  # fmt: skip
        self.gone.append(seq)
        if lane is not None:
            self.lanes[lane] = self.lanes.get(lane, 0) + granted
        count = (queue, class_, code)
        self.counts[count] = self.counts.get(count, 0) + 1
        self.step.topics.add("job:" + id)
        self.step.catalog.seqs.pop(id, None)
        return Verdict(id, _APPLIED, state)

    def write(self) -> None:
        """The rows first: whoever is next in a lane is looked for among those that are left."""
        if not self.gone:
            return
        step = self.step
        if self.completed:
            step.run("outcome_complete", msgspec.json.encode(self.completed).decode(), _ENDED_COMPLETE[1], step.now)
        step.many("outcome_insert", self.outcomes)
        step.run("active_job_delete_all", msgspec.json.encode(self.gone).decode())
        for (queue, class_, code), count in self.counts.items():
            endings.tell(step, queue, class_, RUNNING, code, count)
        if self.lanes:
            lane_limits.hand_on_all(step, self.lanes)
        self.completed, self.outcomes, self.gone, self.lanes, self.counts = {}, [], [], {}, {}


def _apply(step: Step, e: Entry, t: Transition, who: Presence) -> JobState:
    """Carry out a transition of the holder; a requested cancel turns all but a completion into its end."""
    move, reason = t.move, t.reason
    if e.cancel and move is not Move.COMPLETE:
        move, reason = Move.CANCEL, Reason.BY_USER
    elif e.kind == JobKind.TURN and move is Move.RETRY:
        move = Move.FAIL
    elif e.kind == JobKind.TURN and move in (Move.SNOOZE, Move.HAND_BACK, Move.TAKE_BACK, Move.DECLINE):
        move, reason = Move.CANCEL, Reason.BY_USER
    if move is Move.HAND_BACK:
        return endings.hand_back(step, e, who.holder)
    if move is Move.TAKE_BACK:
        return endings.take_back(step, e, who.holder, delay=t.delay)
    if move is Move.DECLINE:
        return endings.decline(step, e, who.holder, t)
    if move in (Move.RETRY, Move.SNOOZE):
        state = JobState.SCHEDULED if t.delay > 0 else JobState.PENDING
        endings.record(step, e, who.holder, move.value, state, reason, t.error)
        if move is Move.SNOOZE:
            e.attempt -= 1
        endings.again(step, e, t.delay, crashed=reason is Reason.CRASHED)
        return state
    state = _FINAL[move]
    endings.end(step, e, state, reason, result=t.result, error=t.error, group=t.error_group, move=move)
    return state


def _judge(step: Step, session: str, held: Held, move: Move | None) -> Verdict:
    """A write by somebody who does not hold the job: a repetition, or stale."""
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
    """Whether a write repeats the one that ended a claim. A requested cancel turns all but a completion into its
    end."""
    if move is None:
        return False
    return outcome == move.value or (outcome == Move.CANCEL.value and move is not Move.COMPLETE)


def progress(step: Step, session: str, reports: Sequence[tuple[Held, bytes]]) -> list[Verdict]:
    """Keep the latest progress of running jobs."""
    for _, value in reports:
        check_size("progress", value, PAYLOAD_BYTES)
    who = Presence.find(step, session)
    ids = json_texts(held.id for held, _ in reports)
    entries = {row[26]: entry_of(row) for row in step.all("records_by_ids", ids)}
    verdicts = []
    for held, value in reports:
        e = entries.get(held.id)
        if e is not None and who is not None and who.present and e.session == who.seq and e.fence == held.fence:
            step.run("job_progress", value, e.seq)
            step.topics.add(job_topic(e.id))
            verdicts.append(Verdict(held.id, Acceptance.APPLIED, JobState.RUNNING))
        else:
            verdicts.append(_judge(step, session, held, None))
    return verdicts


def cancel(step: Step, ids: Sequence[str]) -> list[JobState]:
    """Cancel jobs; nothing is cancelled when one of them is unknown."""
    found = dict(step.all("job_states", json_texts(ids)))
    for id in ids:
        if id not in found:
            raise NotFound(f"there is no job {id!r}")
    return [_cancel_one(step, id) for id in ids]


def _cancel_one(step: Step, id: str) -> JobState:
    row = step.one("record_by_id", id)
    if row is None:
        [(_, state)] = step.all("job_states", json_texts([id]))
        return STATES[state]
    return cancel_entry(step, entry_of(row))


def cancel_entry(step: Step, e: Entry) -> JobState:
    """Cancel a live job: at once while it waits, by request while it runs."""
    if e.state == ARRIVING:
        enqueue.admit_arriving(step, e)
    if e.state != RUNNING:
        endings.end(step, e, JobState.CANCELLED, Reason.BY_USER)
        return JobState.CANCELLED
    if e.kind == JobKind.BROADCAST:
        return broadcasts.cancel(step, e, cancel_entry, endings.end)
    if not e.cancel:
        e.cancel = 1
        step.run("active_job_cancel", e.seq)
        row = step.one("session_id", e.session)
        if row is not None:
            step.topics.add(session_topic(row[0]))
        step.topics.add(job_topic(e.id))
    return JobState.RUNNING
