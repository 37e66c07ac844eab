"""Settings of queues and lanes, schedules, tokens and leadership."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...errors import InvalidInput
from ...model.names import check_key, check_seconds
from ...model.schedule import Schedule
from ...model.session import Term
from ...model.settings import SettingsChange
from ...model.tokens import AccessToken, NewToken, stored
from ..shared.stored_settings import warn_if_replaced
from ..shared.token_rows import same_token, token_of, token_row, unknown_token
from ..wakeups import LEADER, queue_topic, worker_topic
from . import lane_limits
from .records import Queue, job_record_of, lease_left
from .step import Lane, Step


def configure(step: Step, changes: Sequence[SettingsChange]) -> None:
    """Store settings and apply them to lanes."""
    for change in changes:
        queue = step.queue(change.queue)
        declared, version = queue.declared, queue.version
        if change.declared is not None and change.version >= version:
            warn_if_replaced(change, declared, version)
            declared, version = change.declared, change.version
        override = queue.override if change.override is msgspec.UNSET else change.override
        if not queue.problem and (declared, version, override) == (queue.declared, queue.version, queue.override):
            continue
        if override is not None:
            try:
                override.over(declared)
            except InvalidInput as exc:
                raise InvalidInput(exc.field, f"{exc.problem} (queue {change.queue!r}, with its override)") from None
        step.run(
            "queue_configure",
            version,
            msgspec.json.encode(declared).decode(),
            None if override is None else msgspec.json.encode(override).decode(),
            queue.id,
        )
        step.run("settings_changed")
        step.queue_cache.clear()
        step.queue_cache.refresh(step.connection)
        _apply(step, queue, step.queue(change.queue))


def _apply(step: Step, old: Queue, new: Queue) -> None:
    """Apply new limits to the lanes of a queue that have jobs. The cost grows with the number of lanes."""
    if old.settings.lanes != new.settings.lanes:
        for row in step.all("lanes_of_queue", new.id):
            lane: Lane = step.lane(row[0])
            terms = step.queue_cache.terms(new, lane.key)
            if terms.limit is None:
                lane_limits.remove_limit(step, lane)
            else:
                lane_limits.resize(step, lane, terms.limit, terms.ordered)
        for (key,) in step.all("unlimited_lanes_of_queue", new.id):
            if step.queue_cache.terms(new, key).limit is not None:
                _limit(step, new, key)
    step.topics.add(queue_topic(new.name))
    step.topics.update(worker_topic(inbox) for (inbox,) in step.all("inboxes_waiting", new.id))


def _limit(step: Step, queue: Queue, key: str) -> None:
    """Apply a limit to a lane that had none. Running jobs get their places first, then the others by arrival."""
    for row in step.all("unlimited_records_of_lane", queue.id, key):
        lane_limits.add_limit(step, job_record_of(row))


def declare(step: Step, schedules: Sequence[Schedule]) -> None:
    """Store schedules. One whose timetable has changed starts over."""
    for schedule in schedules:
        timetable = msgspec.json.encode(schedule.timetable).decode()
        step.run("schedule_put", schedule.name, timetable, schedule.job, step.now, step.now)


def add_token(step: Step, new: NewToken) -> AccessToken:
    """Store a token, unless it is already stored."""
    row = step.one("token_by_id", new.id)
    if row is not None:
        return same_token(token_of(row), new)
    token = stored(new, step.now)
    step.run("token_add", *token_row(token))
    return token


def revoke_token(step: Step, id: str) -> bool:
    """Revoke a token; returns whether this call revoked it."""
    if step.one("token_by_id", id) is None:
        raise unknown_token(id)
    return step.run("token_revoke", step.now, id).rowcount > 0


def lead(step: Step, session: str, lease: float, term: int | None) -> Term | None:
    """Try to become the leader, or extend a term."""
    check_key("session", session)
    check_seconds("lease", lease, least=0.05)
    row = step.one("leader")
    left = 0.0 if row is None or row[1] is None else lease_left(row[4], row[3], row[2], step.mono, step.boot)
    over = left <= 0
    if term is None:
        if over:
            number = 1 if row is None else row[0] + 1
        elif row[1] == session:
            number = row[0]  # it already leads: the answer to its call was lost
        else:
            return Term(number=row[0], session=row[1], lease=row[2], remaining=left)
    else:
        if over or row[0] != term or row[1] != session:
            return None
        number = term
    step.run("leader_put", number, session, lease, step.boot, step.mono + lease)
    return Term(number=number, session=session, lease=lease, remaining=lease)


def resign(step: Step, term: int) -> None:
    """Give up a term. Its number is kept, so that the next one is higher."""
    if step.run("leader_resign", term).rowcount:
        step.topics.add(LEADER)
