"""Hypothesis strategies: requested jobs and changed settings."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from fairlane.model.job import NewJob, Priority
from fairlane.model.retry import Backoff
from fairlane.model.settings import LaneRule, QueueSettings
from fairlane.model.slots import Reserved

STEADY = Backoff(base=2.2, factor=1.0, jitter=False)
"""Without jitter, so that the model knows when a crashed job is due."""
WORK_LANES = (None, "free:a", "free:b", "cap:a", "one:a", "two:a")
LINES = (
    *(("work", lane) for lane in WORK_LANES),
    *(("mail", lane) for lane in (None, "free:a")),
    *(("models", lane) for lane in ("gpu:a", "gpu:b")),
    # Lanes with several places fill only when they get more than their share.
    *(("work", lane) for lane in ("cap:a", "two:a")),
)
MODELS = QueueSettings(lanes=(LaneRule(pattern="gpu:a", limit=1), LaneRule(pattern="gpu:b", limit=2, ordered=False)))

numbers = st.integers(0, 60)
few = st.lists(numbers, max_size=3)
flags = st.booleans()


@dataclass(frozen=True)
class Wish:
    """A requested job; it gets its id when it is sent."""

    line: tuple[str, str | None]
    priority: Priority
    cost: float
    delay: float
    expires: float | None
    retries: int
    key: str | None
    worker: int | None
    unique: tuple[str, float | None] | None

    def request(self, id: str) -> NewJob:
        """The request for it.

        Two cases are unspecified and therefore not generated: which of two turns of different classes starts first when
        jobs of their lane come and go in one step, and when a grant moves away from a job whose worker cannot take it.
        """
        queue, lane = self.line
        placed = lane not in ("cap:a", "gpu:a", "gpu:b")
        sticky = self.key if placed else None
        return NewJob(
            id=id,
            task="task",
            queue=queue,
            lane=lane,
            priority=Priority.NORMAL if queue == "models" else self.priority,
            cost=self.cost,
            delay=self.delay,
            expires=self.expires,
            retries=self.retries,
            backoff=STEADY,
            sticky=sticky,
            worker=self.worker if placed and sticky is None else None,
            unique=self.unique[0] if self.unique else None,
            unique_for=self.unique[1] if self.unique else None,
        )


wishes = st.builds(
    Wish,
    line=st.sampled_from(LINES),
    priority=st.sampled_from([Priority.NORMAL, Priority.HIGH, Priority.LOW]),
    cost=st.sampled_from([1.0, 1.0, 0.5, 3.0]),
    delay=st.sampled_from([0.0, 0.0, 0.0, 3.2]),
    expires=st.sampled_from([None, None, None, 4.1]),
    retries=st.sampled_from([3, 1, 0]),
    key=st.sampled_from([None, None, None, "k1", "k2", "k3"]),
    worker=st.sampled_from([None, None, None, 0, 5]),
    unique=st.sampled_from([None, None, None, ("u", None), ("v", 6.4)]),
)


@dataclass(frozen=True)
class WorkSettings:
    """The settings of the queue `work` that change. A lane never changes whether it is ordered: what then happens to a
    retry that keeps its place is unspecified."""

    limit: int | None
    reserved: int
    weight: float
    cap: int
    two: int
    paused: bool
    paused_lane: str | None

    def declared(self) -> QueueSettings:
        return QueueSettings(
            limit=self.limit,
            reserved=Reserved(high=self.reserved if self.limit else 0),
            paused=self.paused,
            lanes=(
                LaneRule(pattern="free:a", weight=self.weight, paused=self.paused_lane == "free"),
                LaneRule(pattern="cap:*", limit=self.cap, ordered=False, paused=self.paused_lane == "cap"),
                LaneRule(pattern="one:*", limit=1, paused=self.paused_lane == "one"),
                LaneRule(pattern="two:*", limit=self.two, ordered=True, weight=0.5),
            ),
        )


work_settings = st.builds(
    WorkSettings,
    limit=st.sampled_from([None, None, 2, 4]),
    reserved=st.sampled_from([0, 1]),
    weight=st.sampled_from([1.0, 2.0, 0.25]),
    cap=st.sampled_from([2, 1, 3]),
    two=st.sampled_from([2, 3]),
    paused=st.sampled_from([False, False, False, True]),
    paused_lane=st.sampled_from([None, None, None, "free", "cap", "one"]),
)
