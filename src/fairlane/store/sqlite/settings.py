"""Settings of queues and lanes, schedules, and leadership: the small records that everybody shares."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...errors import InvalidInput
from ...model.names import check_key, check_seconds
from ...model.schedule import Schedule
from ...model.session import Term
from ...model.settings import SettingsChange
from ...model.tokens import AccessToken, NewToken, stored
from ..shared.token_rows import same_token, token_of, token_row, unknown_token
from ..wakeups import LEADER, queue_topic, worker_topic
from . import lane_limits
from .job_record import entry_of
from .leases import lease_left
from .queue_cache import Queue
from .step import Lane, Step


def configure(step: Step, changes: Sequence[SettingsChange]) -> None:
    """Store settings, and bring lanes in line with them."""
    for change in changes:
        queue = step.queue(change.queue)
        declared, version = queue.declared, queue.version
        if change.declared is not None and change.version >= version:
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
        step.catalog.forget()
        step.catalog.refresh(step.connection)
        _apply(step, queue, step.queue(change.queue))


def _apply(step: Step, old: Queue, new: Queue) -> None:
    """Lanes that have jobs get their new places. Costs as much as the queue has lanes, which is why settings change
    rarely."""
    if old.settings.lanes != new.settings.lanes:
        for row in step.all("lanes_of_queue", new.id):
            lane: Lane = step.lane(row[0])
            terms = step.catalog.terms(new, lane.key)
            if terms.limit is None:
                lane_limits.abolish(step, lane)
            else:
                lane_limits.resize(step, lane, terms.limit, terms.ordered)
        for (key,) in step.all("unlimited_lanes_of_queue", new.id):
            if step.catalog.terms(new, key).limit is not None:
                _limit(step, new, key)
    step.topics.add(queue_topic(new.name))
    step.topics.update(worker_topic(inbox) for (inbox,) in step.all("inboxes_waiting", new.id))


def _limit(step: Step, queue: Queue, key: str) -> None:
    """A lane that had no limit has one now. Running jobs take their places first, then the others in order of
    arrival."""
    for row in step.all("unlimited_records_of_lane", queue.id, key):
        lane_limits.establish(step, entry_of(row))


def declare(step: Step, schedules: Sequence[Schedule]) -> None:
    """Store schedules; a changed timetable begins anew."""
    for schedule in schedules:
        timetable = msgspec.json.encode(schedule.timetable).decode()
        step.run("schedule_put", schedule.name, timetable, schedule.job, step.now, step.now)


def add_token(step: Step, new: NewToken) -> AccessToken:
    """Store a token, unless it is stored."""
    row = step.one("token_by_id", new.id)
    if row is not None:
        return same_token(token_of(row), new)
    token = stored(new, step.now)
    step.run("token_add", *token_row(token))
    return token


def revoke_token(step: Step, id: str) -> bool:
    """Revoke a token; whether this call did."""
    if step.one("token_by_id", id) is None:
        raise unknown_token(id)
    return step.run("token_revoke", step.now, id).rowcount > 0


def lead(step: Step, session: str, lease: float, term: int | None) -> Term | None:
    """Stand for leadership, or extend a term."""
    check_key("session", session)
    check_seconds("lease", lease, least=0.05)
    row = step.one("leader")
    over = row is None or row[1] is None or lease_left(row[4], row[3], row[2], step.mono, step.boot) <= 0
    if term is None:
        if over:
            number = 1 if row is None else row[0] + 1
        elif row[1] == session:
            number = row[0]  # it leads already: the reply to its call was lost
        else:
            return None
    else:
        if over or row[0] != term or row[1] != session:
            return None
        number = term
    step.run("leader_put", number, session, lease, step.boot, step.mono + lease)
    return Term(number=number, session=session, lease=lease, remaining=lease)


def resign(step: Step, term: int) -> None:
    """Give up a term; its number stays, so that the next one is higher."""
    if step.run("leader_resign", term).rowcount:
        step.topics.add(LEADER)
