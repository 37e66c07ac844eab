"""The types of response documents, for OpenAPI. `views` builds the documents; a test compares the two."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ..model.job import JobState, Reason
from ..model.session import SessionKind, SessionState
from ..model.settings import LaneRule

Priority = Literal["high", "normal", "low"]


class Sent(msgspec.Struct, frozen=True):
    """A job that was stored or existed already."""

    id: str
    created: bool
    """False if a job with this id or unique value existed already."""
    state: JobState


class SentMany(msgspec.Struct, frozen=True):
    """The results of a batch, in its order."""

    jobs: list[Sent]


class PositionView(msgspec.Struct, frozen=True):
    """The position of a waiting job in its lane."""

    place: int
    """1 for the next job of the lane."""
    of: int
    """Waiting jobs of the lane."""
    ahead: int
    """Jobs of the lane that start before it."""
    exact: bool
    """If false, `place` and `ahead` are lower bounds."""
    eta: float | None
    """Estimated seconds until it starts; null if unknown."""
    queue_ahead: int
    """An estimate of the jobs of the whole queue that start before it."""
    of_exact: bool


class AttemptView(msgspec.Struct, frozen=True):
    """One run of a job."""

    fence: int
    attempt: int
    session: str
    worker: str
    started_at: float
    ended_at: float | None
    outcome: str | None
    state: JobState | None
    reason: Reason | None
    error: str | None
    refused: int


class JobSummary(msgspec.Struct, frozen=True):
    """A job in a list."""

    id: str
    task: str
    queue: str
    lane: str | None
    priority: Priority
    kind: Literal["job", "turn", "broadcast", "cleanup"]
    state: JobState
    reason: Reason | None
    attempt: int
    retries: int
    worker: str | None
    sticky: str | None
    enqueued_at: float
    due_at: float | None
    expires_at: float | None
    started_at: float | None
    finished_at: float | None
    cancel_requested: bool
    error: str | None
    error_group: str | None
    retry_of: str | None
    parent: str | None


class JobView(JobSummary, frozen=True):
    """A job with all its fields."""

    payload: Any
    """[args, kwargs]"""
    progress: Any
    result: Any
    fence: int
    arrival: int | None
    unique: str | None
    pool: str
    direct: int | None
    cost: float
    timeout: float | None
    suspect: bool
    attempts: list[AttemptView]
    position: PositionView | None
    """null unless the job waits."""
    eta: float | None
    """Estimated seconds until it starts; null if it does not wait or if unknown."""
    why: str
    """What the job waits for, or how it ended."""


class JobPage(msgspec.Struct, frozen=True):
    """Jobs, newest first. `cursor` is for the next page; null on the last one."""

    jobs: list[JobSummary]
    cursor: str | None


class Outcome(msgspec.Struct, frozen=True):
    """How a job ended, or where it is."""

    id: str
    state: JobState
    final: bool
    reason: Reason | None
    result: Any
    error: str | None
    progress: Any


class Cancelled(msgspec.Struct, frozen=True):
    """The answer to a cancel."""

    id: str
    answer: Literal["cancelled", "requested", "completed", "failed"]
    """requested: it runs and was asked to stop. completed, failed: too late."""


class Retried(msgspec.Struct, frozen=True):
    """The job that runs another one again."""

    id: str
    retry_of: str


class BulkView(msgspec.Struct, frozen=True):
    """The result of a bulk change."""

    dry_run: bool
    matched: int
    changed: int
    requested: int
    """Running jobs that were asked to stop."""
    unchanged: dict[str, int]
    """Jobs that were not changed, by reason."""
    refusal: str | None
    more: bool
    """Whether it stopped at `most`. Repeat a cancel or a purge for the rest. A retry examines the same newest jobs
    again, so it needs a higher `most`."""
    jobs: list[JobSummary]
    """The first few jobs of the selection."""


class CountsView(msgspec.Struct, frozen=True):
    """Jobs by state. Final states count all jobs that ever ended."""

    scheduled: int
    pending: int
    running: int
    completed: int
    failed: int
    cancelled: int


class Classes(msgspec.Struct, frozen=True):
    """Counts by priority."""

    high: CountsView
    normal: CountsView
    low: CountsView


class QueueView(CountsView, frozen=True):
    """A queue with its counts and limits."""

    name: str
    workers: int
    oldest_wait: float | None
    paused: bool
    limit: int | None
    max_pending: int | None
    overridden: bool
    classes: Classes


class QueueDetail(QueueView, frozen=True):
    """A queue with its settings."""

    declared: Any
    override: Any
    lanes: list[LaneRule]
    """The lane rules in force."""


class Queues(msgspec.Struct, frozen=True):
    """Every queue, by name."""

    queues: list[QueueView]


class LaneView(msgspec.Struct, frozen=True):
    """A lane that has jobs."""

    queue: str
    lane: str | None
    pending: int
    running: int
    exact: bool
    oldest_wait: float | None
    """Seconds that its oldest waiting job has waited; null if none waits."""
    share: float | None
    """The lane's share of the queue's starts by weight; null on a page that does not have all lanes."""
    limit: int | None
    """The number of places: 0 while the lane is paused."""
    weight: float
    ordered: bool
    max_pending: int | None
    paused: bool
    own_limit: int | None
    """The limit that applies once the lane is resumed."""


class SteeredLane(msgspec.Struct, frozen=True):
    """The settings of one lane after a change, for a token that is bound to lanes."""

    queue: str
    lane: str
    limit: int | None
    weight: float
    ordered: bool
    max_pending: int | None
    paused: bool
    own_limit: int | None


class Lanes(msgspec.Struct, frozen=True):
    """Lanes of a queue, longest backlog first."""

    lanes: list[LaneView]
    cursor: str | None


class LineJob(msgspec.Struct, frozen=True):
    """A running or waiting job of a lane."""

    id: str
    task: str
    state: JobState
    priority: Priority
    enqueued_at: float
    attempt: int
    started_at: float | None
    """null for a waiting job."""
    place: int | None
    """1 for the next waiting job; null for a running job."""


class Line(msgspec.Struct, frozen=True):
    """The jobs of a lane in their order."""

    queue: str
    lane: str | None
    ordered: bool
    jobs: list[LineJob]
    cursor: str | None
    exact: bool


class WorkerView(msgspec.Struct, frozen=True):
    """A session: a worker, a manager, or a process that waits for a turn."""

    id: str
    kind: SessionKind
    state: SessionState
    host: str
    pid: int
    pool: str
    index: int | None
    named: bool
    queues: list[str]
    slots: Any
    started_at: float
    lease: float
    remaining: float
    running: int
    worker: str | None
    classes: ClassNumbers
    """Its running jobs by priority."""


class ClassNumbers(msgspec.Struct, frozen=True):
    """A number for each priority."""

    high: int
    normal: int
    low: int


class Workers(msgspec.Struct, frozen=True):
    """Sessions, newest first."""

    workers: list[WorkerView]


class BindingView(msgspec.Struct, frozen=True):
    """A sticky key and its worker."""

    pool: str
    key: str
    index: int
    state: Literal["open", "draining", "released", "lost"]
    opened_at: float
    used_at: float
    closed_at: float | None
    cleanup: str | None
    cleanup_failed: bool


class Bindings(msgspec.Struct, frozen=True):
    """Bindings, open bindings first."""

    bindings: list[BindingView]


class Released(msgspec.Struct, frozen=True):
    """The result of a release."""

    key: str
    pool: str
    answer: Literal["nothing", "draining", "released"]


class FailureView(msgspec.Struct, frozen=True):
    """Failed jobs of a task with the same error group, within the retention."""

    task: str
    error_group: str
    count: int
    first_at: float
    last_at: float
    reason: Reason
    """The reason of the newest job."""
    example_id: str
    """The id of the newest job."""
    error_line: str | None
    """The line that names the newest job's error."""
    exact: bool
    """If false, `count` is a lower bound."""


class Failures(msgspec.Struct, frozen=True):
    """Groups of failed jobs, largest first."""

    failures: list[FailureView]


class ScheduleView(msgspec.Struct, frozen=True):
    """A schedule."""

    name: str
    timetable: Any
    next: float | None
    last: float | None
    stored_at: float
    declared_at: float
    live: bool
    stopped: bool
    last_job: str | None
    """The id of the job of the last slot; it may be older than the retention keeps."""


class Schedules(msgspec.Struct, frozen=True):
    """Every schedule, by name."""

    schedules: list[ScheduleView]


class LeaderView(msgspec.Struct, frozen=True):
    """The current term."""

    term: int
    session: str
    lease: float
    remaining: float


class Leader(msgspec.Struct, frozen=True):
    """The current leader; null if there is none."""

    leader: LeaderView | None


class TaskView(msgspec.Struct, frozen=True):
    """A task with the JSON Schemas of its arguments and result."""

    name: str
    queue: str
    lane: str | None
    priority: Priority
    retries: int
    timeout: float | None
    schedule: Any
    isolate: bool
    signature: str
    arguments: Any
    """JSON Schema of an object with every argument by name."""
    result: Any
    """JSON Schema of the result."""


class Tasks(msgspec.Struct, frozen=True):
    """The tasks of the application, by name."""

    tasks: list[TaskView]
