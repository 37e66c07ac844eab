"""The live screen: what it shows, and that it fits a terminal of 80 columns."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from fairlane.cli.overview import Overview
from fairlane.cli.top import Rates, Snapshot, screen
from fairlane.model.job import Job, JobKind, JobState, Priority
from fairlane.model.lanes import LaneTerms
from fairlane.model.reading import Counts, LaneReading, QueueReading
from fairlane.model.retry import DEFAULT_BACKOFF
from fairlane.model.session import Session, SessionKind, SessionState, Term
from fairlane.model.settings import QueueSettings
from fairlane.model.slots import Reserved, Slots

STORE = "postgresql://artbot@db.example.org/artbot"


def queue_of(name: str, failed: int = 0, oldest_wait: float | None = None, pending: int = 0) -> QueueReading:
    """A queue."""
    counts = Counts(pending=pending, running=12, scheduled=3, completed=1_204_311, failed=failed, cancelled=17)
    settings = QueueSettings(limit=40, max_pending=10_000)
    return QueueReading(
        name=name,
        settings=settings,
        declared=settings,
        version=1,
        override=None,
        classes=(Counts(), counts, Counts()),
        workers=4,
        oldest_wait=oldest_wait,
    )


def session_of(index: int) -> Session:
    """A worker."""
    return Session(
        id=f"session-{index}",
        kind=SessionKind.WORKER,
        state=SessionState.LIVE,
        host="worker-7f9c5d6b8-x2x4z",
        pid=2_315_441 + index,
        pool="default",
        index=index,
        named=False,
        queues=("images", "mail", "models", "video-transcoding"),
        slots=Slots(total=10, reserved=Reserved(high=1)),
        started_at=time.time() - 4_000,
        lease=15.0,
        remaining=12.0,
        running=(1, 5, 0),
    )


def job_of(number: int) -> Job:
    """A job that runs."""
    return Job(
        id=f"0199e2b7-56cb-702b-9f0c-b2689e29{number:04}",
        task="artbot.tasks.images.render_picture",
        queue="images",
        kind=JobKind.JOB,
        state=JobState.RUNNING,
        reason=None,
        lane=f"user:{number}@example.org",
        priority=Priority.NORMAL,
        cost=1.0,
        payload=b"[[],{}]",
        headers=None,
        retries=3,
        backoff=DEFAULT_BACKOFF,
        timeout=None,
        unique=None,
        pool="default",
        sticky=None,
        direct=None,
        worker=f"default/{number % 4}",
        session="session-0",
        attempt=1,
        fence=1,
        arrival=number,
        retry_of=None,
        parent=None,
        enqueued_at=time.time() - 100,
        due_at=None,
        expires_at=None,
        started_at=time.time() - 42 * number,
        finished_at=None,
        cancel_requested=False,
        suspect=False,
        progress=None,
        result=None,
        error=None,
        error_group=None,
        attempts=(),
    )


def snapshot_of() -> Snapshot:
    """A busy fleet."""
    queues = [queue_of("images", 214, 754.0, 61_204), queue_of("mail", 0, 1.2, 12), queue_of("video-transcoding", 3)]
    lanes = [
        LaneReading(queue="images", lane=f"user:{n}@example.org", terms=LaneTerms(limit=2), pending=900 - n, running=2)
        for n in range(3)
    ]
    sessions = tuple(session_of(index) for index in range(3))
    leader = Term(number=41, session="session-0", lease=10.0, remaining=8.0)
    overview = Overview(queues=tuple(queues), sessions=sessions, leader=leader)
    return Snapshot(overview=overview, lanes=lanes, running=tuple(job_of(number) for number in range(1, 5)))


def rendered(width: int, height: int = 24, rates: Rates | None = None) -> list[str]:
    """The lines of the screen."""
    console = Console(width=width, height=height, file=io.StringIO(), highlight=False)
    with console.capture() as capture:
        console.print(screen(STORE, snapshot_of(), rates or Rates(), width, height))
    return [line.rstrip() for line in capture.get().split("\n")]


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_no_row_is_wrapped_and_nothing_is_cut(width: int) -> None:
    lines = rendered(width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for word in ("images", "video-transcoding", "61,204", "13 min", "214", "default/2", "42 s", "user:1@example.org"):
        assert word in text
    [queue] = [line for line in lines if "61,204" in line and "images" in line]
    assert "13 min" in queue
    assert "214" in queue
    [job] = [line for line in lines if "user:1@example.org" in line and "default/1" in line]
    assert "42 s" in job
    assert "render_picture" in job


def test_a_small_fleet_fits_80_columns_and_24_lines() -> None:
    assert len(rendered(80, 24)) <= 33, "only the longest lanes may be cut off"
    assert "default/2" in "\n".join(rendered(80, 24)[:24])


def test_a_wide_terminal_sees_more() -> None:
    narrow, wide = "\n".join(rendered(80)), "\n".join(rendered(160))
    for word in (
        "1,204,311",
        "artbot.tasks.images.render_picture",
        "0199e2b7-56cb-702b-9f0c-b2689e290001",
        "worker-7f9c5d6b8",
    ):
        assert word in wide
        assert word not in narrow


def test_the_summary_shows_the_oldest_wait_and_failures() -> None:
    rates = Rates()
    rates.add(snapshot_of().overview)
    time.sleep(0.01)
    rates.add(snapshot_of().overview)
    [summary] = [line for line in rendered(80, rates=rates) if line.startswith("pending")]
    for word in ("pending 61,216", "oldest 13 min", "running 36", "failed 217", "217 (0.0/s)", "done 0.0/s"):
        assert word in summary
