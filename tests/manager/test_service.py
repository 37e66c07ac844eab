"""The loop around a service: its rests, its back-off, and what it logs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from random import Random

import pytest

from fairlane.errors import SessionLost, StoreFull, StoreUnavailable, TermLost
from fairlane.manager.service import BACKOFF, FailureTracker, Loop

from .waiting import running, until

LOG = logging.getLogger("fairlane.tests")


class Counting:
    """A service that counts its passes and returns what the test sets."""

    name = "counter"

    def __init__(self, answer: Callable[[int], float]) -> None:
        self.passes = 0
        self._answer = answer

    async def run_once(self) -> float:
        self.passes += 1
        return self._answer(self.passes)


def always(delay: float) -> Callable[[int], float]:
    return lambda _: delay


async def test_passes_follow_each_other_after_the_delay_they_ask_for() -> None:
    service = Counting(always(0.2))
    started = time.monotonic()

    async with running(Loop(service, LOG).run()):
        await until(lambda: service.passes == 3)

    # Two rests, each shortened by at most a tenth.
    assert time.monotonic() - started >= 2 * 0.2 * 0.9 - 0.01


async def test_a_service_that_is_always_full_lets_others_run() -> None:
    service = Counting(always(0.0))
    async with running(Loop(service, LOG).run()):
        for _ in range(50):
            await asyncio.sleep(0)

    assert 10 <= service.passes <= 60


async def test_a_wake_ends_the_rest() -> None:
    service = Counting(always(3_600.0))
    loop = Loop(service, LOG)
    async with running(loop.run()):
        await until(lambda: service.passes == 1)
        await asyncio.sleep(0.02)
        assert service.passes == 1
        loop.wake()
        await until(lambda: service.passes == 2)


async def test_a_wake_during_a_pass_is_not_lost() -> None:
    class Slow(Counting):
        async def run_once(self) -> float:
            delay = await super().run_once()
            if self.passes == 1:
                loop.wake()
            return delay

    service = Slow(always(3_600.0))
    loop = Loop(service, LOG)
    async with running(loop.run()):
        await until(lambda: service.passes == 2)
        await asyncio.sleep(0.02)

    assert service.passes == 2


class Hanging(Counting):
    async def run_once(self) -> float:
        await super().run_once()
        return await asyncio.Event().wait()


@pytest.mark.parametrize("service", [Counting(always(3_600.0)), Hanging(always(0.0))], ids=["rest", "pass"])
async def test_cancellation_ends_the_loop(service: Counting) -> None:
    task = asyncio.create_task(Loop(service, LOG).run())
    await until(lambda: service.passes == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("lost", [TermLost("over"), SessionLost("gone")])
async def test_a_lost_right_ends_the_loop(lost: Exception) -> None:
    def answer(_: int) -> float:
        raise lost

    with pytest.raises(type(lost)):
        await Loop(Counting(answer), LOG).run()


async def test_an_outage_is_logged_once_when_it_begins_and_once_when_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def answer(number: int) -> float:
        if number <= 4:
            raise StoreUnavailable("no answer")
        return 3_600.0

    service = Counting(answer)
    with caplog.at_level(logging.INFO):
        async with running(Loop(service, LOG).run()):
            await until(lambda: service.passes == 5)
            await until(lambda: len(caplog.messages) == 2)

    assert caplog.messages == ["counter: store unavailable, trying again (no answer)", "counter: works again"]


async def test_another_kind_of_failure_is_logged_too(caplog: pytest.LogCaptureFixture) -> None:
    kinds = [StoreUnavailable("no answer"), StoreFull("no room"), StoreFull("no room"), ValueError("a mistake")]

    def answer(number: int) -> float:
        if number <= len(kinds):
            raise kinds[number - 1]
        return 3_600.0

    service = Counting(answer)
    async with running(Loop(service, LOG).run()):
        await until(lambda: service.passes == 5)

    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 3
    assert told[2].exc_info is not None, "a mistake in the code needs its traceback"


async def test_an_outage_is_neither_a_busy_loop_nor_cut_short_by_wakes() -> None:
    def answer(_: int) -> float:
        raise StoreUnavailable("no answer")

    service = Counting(answer)
    loop = Loop(service, LOG, Random(1))
    async with running(loop.run()):
        ends = time.monotonic() + 1.0
        while time.monotonic() < ends:
            loop.wake()
            await asyncio.sleep(0.001)

    assert 1 <= service.passes <= 30


def test_the_back_off_grows_with_full_jitter_and_restarts_after_a_success() -> None:
    class Highest(Random):
        def random(self) -> float:
            return 0.999_999

    failures = FailureTracker("it", LOG, Highest())
    pauses = [failures.failed(StoreUnavailable("no answer")) for _ in range(10)]
    assert pauses[:4] == pytest.approx([0.1, 0.2, 0.4, 0.8], rel=0.01)
    assert pauses[-1] == pytest.approx(BACKOFF.most, rel=0.01)
    failures.worked()
    assert failures.failed(StoreUnavailable("no answer")) == pytest.approx(0.1, rel=0.01)

    class Lowest(Random):
        def random(self) -> float:
            return 0.0

    assert FailureTracker("it", LOG, Lowest()).failed(StoreUnavailable("no answer")) > 0
