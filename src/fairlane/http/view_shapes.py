"""The types of the response documents that the dashboard needs beside those of `shapes`."""

from __future__ import annotations

from typing import Literal

import msgspec

from .shapes import BindingView, JobSummary, Priority

Level = Literal["ok", "warn", "error"]


class SessionView(msgspec.Struct, frozen=True):
    """Who calls, and what it may do."""

    caller: str
    """The name of the token, or "local"."""
    scopes: list[str]
    bound: bool
    """Whether it sees only some queues or lanes."""
    queues: list[str] | None
    lane_prefix: str | None
    cookie: bool
    """Whether a browser is signed in with a token."""
    version: str
    features: list[str]
    """Subjects of operations that not every service has, such as "celery"."""


class SignedOut(msgspec.Struct, frozen=True):
    """The cookie was removed."""

    signed_out: bool


class WaitView(msgspec.Struct, frozen=True):
    """The seconds that jobs waited for their start: the median and the 95th percentile."""

    p50: float | None
    p95: float | None
    jobs: int
    """How many jobs were examined."""


class Waits(msgspec.Struct, frozen=True):
    """The time to start, of all jobs and by priority."""

    all: WaitView
    high: WaitView
    normal: WaitView
    low: WaitView


class HistoryView(msgspec.Struct, frozen=True):
    """The last hour in columns: each entry is an interval."""

    since: float | None
    """When the first counts were read; null if none were."""
    interval: float
    at: list[float]
    """The end of each interval."""
    completed: list[int]
    failed: list[int]
    cancelled: list[int]
    pending: list[int]
    """Jobs that waited at the end of the interval."""
    running: list[int]
    waits: Waits


class FindingView(msgspec.Struct, frozen=True):
    """One finding of the diagnosis."""

    level: Level
    topic: str
    what: str
    advice: str | None
    """What to do about it."""


class Diagnosis(msgspec.Struct, frozen=True):
    """The findings, errors first."""

    at: float
    findings: list[FindingView]


class FailureCounts(msgspec.Struct, frozen=True):
    """The failures of one group over time."""

    task: str
    error_group: str
    counts: list[int]
    """In equal parts of the time, oldest first."""


class FailureTimeline(msgspec.Struct, frozen=True, rename={"from_": "from"}):
    """Failures over time."""

    from_: float
    until: float
    exact: bool
    """False if more jobs failed than were examined."""
    groups: list[FailureCounts]


class Counters(msgspec.Struct, frozen=True):
    """What the servers of the store count."""

    counters: dict[str, int]


class FoundLane(msgspec.Struct, frozen=True):
    """A lane of a queue."""

    queue: str
    lane: str


class Found(msgspec.Struct, frozen=True):
    """What a search found."""

    jobs: list[JobSummary]
    """At most 10 for each way to match."""
    by: list[str]
    """How the jobs matched: id, task, sticky, worker, lane."""
    queues: list[str]
    lanes: list[FoundLane]
    tasks: list[str]
    bindings: list[BindingView]
    complete: bool
    """False if a lane was not searched in every queue."""


class NextJob(msgspec.Struct, frozen=True):
    """A waiting job and when it starts."""

    id: str
    task: str
    lane: str | None
    priority: Priority
    enqueued_at: float
    why: str
    eta: float | None
    ahead: int
    """An estimate of the jobs of the queue that start before it."""


class NextJobs(msgspec.Struct, frozen=True):
    """The jobs of a queue that start next, in the estimated order."""

    jobs: list[NextJob]


class LoadView(msgspec.Struct, frozen=True):
    """The load of a queue of Celery."""

    pending: int
    running: int


class Loads(msgspec.Struct, frozen=True):
    """The loads of the balanced queues, by name."""

    queues: dict[str, LoadView]
