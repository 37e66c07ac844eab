"""Turns: the caller's own code in the order of a lane."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextvars import Context
from typing import Any

import pytest
from msgspec.structs import replace

from fairlane import (
    Fairlane,
    InvalidInput,
    JobCancelled,
    JobState,
    ManualClock,
    Position,
    SessionLost,
    Settings,
    StoreUnavailable,
    Turn,
    WouldDeadlock,
)
from fairlane.errors import FairlaneError
from fairlane.model.job import JobKind
from fairlane.model.session import SessionKind, SessionState
from fairlane.store.port import Store

from .conftest import QUICK, eventually, kit_of, store_class

SOON = 30


@pytest.fixture
def models(app: Fairlane) -> Fairlane:
    """An application with a lane for one, and one for two."""
    return with_lanes(app)


@pytest.fixture
async def hasty_models(url: str) -> AsyncIterator[Fairlane]:
    """The same with a short lease."""
    app = Fairlane(settings=Settings(url=url, intervals=replace(QUICK, lease=3.0)))
    yield with_lanes(app)
    await app.close()


def with_lanes(app: Fairlane) -> Fairlane:
    app.queue("models").lane("flux", limit=1).lane("wide", limit=2)
    return app


def _turn(app: Fairlane, lane: str = "flux", **options: Any) -> Turn:
    return app.turn(lane, queue="models", **options)


async def _states(app: Fairlane) -> list[str]:
    """The states of all turns, oldest first."""
    return [job.state.value for job in reversed((await app.client.find(queue="models")).jobs)]


async def _settled(app: Fairlane, *expected: str) -> None:
    async def reached() -> bool:
        return await _states(app) == list(expected)

    await eventually(reached)


async def _count(app: Fairlane, expected: int) -> None:
    async def reached() -> bool:
        return len(await _states(app)) == expected

    await eventually(reached)


async def test_a_turn_in_a_free_lane_begins_at_once_and_is_completed_at_the_end(models: Fairlane) -> None:
    async with _turn(models) as turn:
        job = await models.client.job(turn.id)
        assert (job.kind, job.state, job.fence) == (JobKind.TURN, JobState.RUNNING, turn.fence)
        assert turn.fence >= 1
    assert await _states(models) == ["completed"]


async def test_turns_of_one_lane_run_one_after_the_other_in_order(models: Fairlane) -> None:
    running: list[int] = []
    order: list[int] = []

    async def one(number: int) -> None:
        async with _turn(models):
            running.append(number)
            assert running == [number]
            order.append(number)
            await asyncio.sleep(0.01)
            running.remove(number)

    async with asyncio.timeout(SOON):
        async with asyncio.TaskGroup() as group:
            for number in range(8):
                group.create_task(one(number))
                await _count(models, number + 1)
    assert order == list(range(8))


async def test_position_changes_are_passed_to_sync_and_async_callables(models: Fairlane) -> None:
    told: list[Position] = []
    told_later: list[Position] = []
    first_told = asyncio.Event()

    async def listen(position: Position) -> None:
        told_later.append(position)
        first_told.set()

    async with asyncio.timeout(SOON), asyncio.TaskGroup() as group, _turn(models) as holder:
        group.create_task(_enter_elsewhere(models, on_position=told.append))
        await _settled(models, "running", "pending")
        group.create_task(_enter_elsewhere(models, on_position=listen))
        await first_told.wait()
        assert holder.fence >= 1
    assert {position.ahead for position in told} == {0}
    assert told_later[0].ahead == 1


async def test_a_body_that_raises_fails_its_turn_and_hands_the_lane_on(models: Fairlane) -> None:
    with pytest.raises(ZeroDivisionError):
        async with _turn(models):
            _ = 1 / 0
    async with _turn(models, timeout=SOON):
        pass
    assert await _states(models) == ["failed", "completed"]
    [failed] = (await models.client.find(state=JobState.FAILED)).jobs
    assert "ZeroDivisionError" in (failed.error or "")


async def test_a_turn_that_is_cancelled_in_line_leaves_the_line(models: Fairlane) -> None:
    async with _turn(models):
        waiting = asyncio.create_task(_enter_elsewhere(models))
        await _settled(models, "running", "pending")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await _settled(models, "running", "cancelled")


async def test_a_caller_that_goes_at_any_moment_never_keeps_the_lane(models: Fairlane) -> None:
    async with _turn(models):
        pass

    async def brief() -> None:
        async with _turn(models):
            await asyncio.sleep(0)

    for moment in range(30):
        task = asyncio.create_task(brief())
        for _ in range(moment):
            await asyncio.sleep(0.0005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    async with _turn(models, timeout=SOON):
        pass

    async def all_over() -> bool:
        return set(await _states(models)) <= {"completed", "cancelled", "failed"}

    await eventually(all_over)


async def test_a_body_that_is_cancelled_ends_its_turn_as_cancelled(models: Fairlane) -> None:
    began = asyncio.Event()

    async def body() -> None:
        async with _turn(models):
            began.set()
            await asyncio.sleep(SOON)

    task = asyncio.create_task(body())
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await _settled(models, "cancelled")


async def test_a_wait_that_takes_too_long_is_a_timeout_and_leaves_the_line(models: Fairlane) -> None:
    async with _turn(models):
        with pytest.raises(TimeoutError, match="flux"):
            await asyncio.create_task(_enter_elsewhere(models, timeout=0.1))
        await _settled(models, "running", "cancelled")


async def _enter_elsewhere(app: Fairlane, **options: Any) -> None:
    """Take a turn as a separate caller: code that is started inside a turn counts as inside of it."""

    async def enter() -> None:
        async with _turn(app, **options):
            pass

    await asyncio.get_running_loop().create_task(enter(), context=Context())


async def test_a_turn_that_expires_in_line_is_cancelled_by_the_store(still_app: Fairlane, clock: ManualClock) -> None:
    still_app.queue("models").lane("flux", limit=1)
    async with _turn(still_app):
        waiting = asyncio.create_task(_enter_elsewhere(still_app, expires=10))
        await _settled(still_app, "running", "pending")
        clock.advance(11)
        await (await still_app.connection.store()).promote()
        with pytest.raises(JobCancelled, match="expired"):
            await waiting


async def test_a_turn_inside_a_turn_of_the_same_lane_would_deadlock(models: Fairlane) -> None:
    async with _turn(models):
        with pytest.raises(WouldDeadlock, match="flux"):
            async with _turn(models, timeout=SOON):
                pytest.fail("it holds the only place itself")
    async with _turn(models, "wide"), _turn(models, "wide", timeout=SOON):
        with pytest.raises(WouldDeadlock, match="wide"):
            async with _turn(models, "wide", timeout=SOON):
                pytest.fail("it holds both places itself")
    async with _turn(models, timeout=SOON):
        pass


async def test_a_lane_without_a_limit_is_refused_naming_the_call_that_sets_one(models: Fairlane) -> None:
    with pytest.raises(InvalidInput, match=r"app\.queue\('models'\)\.lane\('other', limit=1\)"):
        async with _turn(models, "other"):
            pytest.fail("there is no lane")
    assert await _states(models) == []


@pytest.mark.parametrize("bad", [{"priority": "urgent"}, {"timeout": -1}, {"expires": -1}, {"lane": ""}])
async def test_bad_options_are_refused_at_the_call(models: Fairlane, bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(bad))):
        models.turn(**({"lane": "flux"} | bad))


async def test_a_turn_is_used_once_and_has_a_fence_only_inside(models: Fairlane) -> None:
    turn = _turn(models)
    with pytest.raises(FairlaneError, match="before"):
        _ = turn.fence
    async with turn:
        pass
    with pytest.raises(FairlaneError, match="once"):
        async with turn:
            pass


async def test_an_error_of_on_position_reaches_the_caller_and_leaves_the_line(models: Fairlane) -> None:
    def broken(position: Position) -> None:
        raise InvalidInput("screen", "is too small")

    async with _turn(models):
        with pytest.raises(InvalidInput, match="screen"):
            await _enter_elsewhere(models, on_position=broken)
        await _settled(models, "running", "cancelled")


async def test_cancelling_a_running_turn_stops_its_code(models: Fairlane) -> None:
    began = asyncio.Event()
    ids: list[str] = []

    async def body() -> None:
        async with _turn(models) as turn:
            ids.append(turn.id)
            began.set()
            await asyncio.sleep(SOON)

    task = asyncio.create_task(body())
    await began.wait()
    await models.client.cancel(ids)
    async with asyncio.timeout(SOON):
        with pytest.raises(JobCancelled, match="by_user"):
            await task
    assert task.cancelling() == 0
    await _settled(models, "cancelled")


async def test_one_session_serves_all_turns_and_ends_with_the_application(models: Fairlane) -> None:
    for _ in range(3):
        async with _turn(models):
            pass
    [session] = await models.client.sessions()
    assert (session.kind, session.state) == (SessionKind.WAITER, SessionState.LIVE)
    await models.close()
    [session] = await models.client.sessions()
    assert session.state is SessionState.ENDED
    async with _turn(models):
        pass
    assert len(await models.client.sessions()) == 2


async def test_a_session_is_kept_beyond_its_lease_and_there_is_a_leader(hasty_models: Fairlane) -> None:
    async with _turn(hasty_models):
        await asyncio.sleep(4.0)
    assert await hasty_models.client.leader() is not None
    assert await _states(hasty_models) == ["completed"]


async def _end_session(app: Fairlane) -> None:
    """Do what happens to a session that is declared dead, without waiting for that."""
    [session] = await app.client.sessions()
    await (await app.connection.store()).leave(session.id)


async def test_a_session_that_was_declared_dead_stops_the_body_and_the_next_turn_gets_another(
    models: Fairlane,
) -> None:
    stopped = asyncio.Event()

    async def hold() -> None:
        async with _turn(models):
            try:
                await _end_session(models)
                await asyncio.sleep(SOON)
            except asyncio.CancelledError:
                stopped.set()
                raise

    with pytest.raises(SessionLost, match="lost"):
        await hold()
    assert stopped.is_set()
    current = asyncio.current_task()
    assert current is not None
    assert current.cancelling() == 0
    async with _turn(models, timeout=SOON):
        pass
    assert len(await models.client.sessions()) == 2
    await _settled(models, "cancelled", "completed")


async def test_a_body_that_ends_before_it_learns_of_its_loss_gets_the_error_at_the_end(
    models: Fairlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = _turn(models)
    # The keeper may detect the loss at any moment, and would then cancel the task of the test.
    monkeypatch.setattr(turn, "_lose_later", lambda error: None)
    await turn.__aenter__()
    await _end_session(models)
    with pytest.raises(SessionLost, match="lost"):
        await turn.__aexit__(None, None, None)


async def test_a_body_is_stopped_before_the_lease_ends_when_contact_is_lost(
    hasty_models: Fairlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object, **__: object) -> None:
        raise StoreUnavailable("the disk is away")

    async def hold() -> None:
        async with _turn(hasty_models):
            with monkeypatch.context() as patch:
                patch.setattr(store_class(hasty_models), "renew", away)
                await asyncio.sleep(SOON)

    with pytest.raises(SessionLost, match="unreachable"):
        await hold()
    await _settled(hasty_models, "failed")


async def test_a_place_that_cannot_be_given_back_now_is_given_back_later(
    models: Fairlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = store_class(models)
    finish, refusals = kind.finish, 0

    async def away_at_first(self: Store, *args: Any, **named: Any) -> Any:
        nonlocal refusals
        refusals += 1
        if refusals <= 3:
            raise StoreUnavailable("the disk is away")
        return await finish(self, *args, **named)

    async with _turn(models):
        monkeypatch.setattr(kind, "finish", away_at_first)
    async with _turn(models, timeout=SOON):
        pass
    assert refusals >= 4
    await _settled(models, "completed", "completed")


async def test_a_job_and_a_turn_share_the_places_of_a_lane(models: Fairlane) -> None:
    @models.task(queue="models", lane="flux")
    async def paint() -> None: ...

    async with _turn(models):
        job = await paint.enqueue()
        assert await job.why() == "lane flux is at its limit of 1"
        with pytest.raises(WouldDeadlock, match="flux"):
            await job.result(timeout=SOON)
    worker = await (await kit_of(models)).worker("models")
    [claimed] = await worker.claim()
    assert claimed.id == job.id
    waiting = asyncio.create_task(_enter_elsewhere(models, timeout=SOON))
    await worker.complete(claimed)
    await waiting


async def test_a_caller_that_leaves_while_the_session_begins_does_not_end_it_for_the_others(models: Fairlane) -> None:
    await models.connection.store()
    callers = [asyncio.create_task(_enter_elsewhere(models, timeout=SOON)) for _ in range(4)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    callers[0].cancel()
    callers[1].cancel()
    answers = await asyncio.gather(*callers, return_exceptions=True)
    assert [type(answer) for answer in answers] == [
        asyncio.CancelledError,
        asyncio.CancelledError,
        type(None),
        type(None),
    ]
    assert len(await models.client.sessions()) == 1
