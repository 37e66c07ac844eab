"""The client for code without an event loop: the same verbs and types, refused where they would block a loop."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest

from fairlane import Fairlane, FairlaneError, JobState, Settings, WouldDeadlock
from fairlane.blocking import BlockingBroadcastHandle, BlockingClient, BlockingHandle
from fairlane.client import Client
from fairlane.handle import BroadcastHandle, Handle, Position
from fairlane.model.job import Priority
from fairlane.model.session import Claim, NewSession, SessionKind
from fairlane.model.slots import Ask, Slots
from fairlane.model.states import complete
from fairlane.runtime.loop_thread import LoopThread

from .conftest import QUICK


@pytest.fixture
def plain(url: str) -> Iterator[Fairlane]:
    """An application for tests that have no event loop."""
    app = Fairlane(settings=Settings(url=url, intervals=QUICK))
    app.queue("models").lane("flux", limit=1)
    yield app
    app.blocking.close()


async def _run_next(app: Fairlane, result: bytes) -> None:
    """Play a worker that runs one job."""
    store = await app.connection.store()
    session = NewSession(id="w", kind=SessionKind.WORKER, queues=("default",), slots=Slots(total=9))
    await store.register(session)
    claim = Claim(number=1, asks=(Ask("default", Priority.NORMAL, 1), Ask(None, Priority.NORMAL, 1)), total=1)
    [job] = await store.claim("w", claim)
    await store.finish("w", [complete(job.held, result)])


def test_a_result_comes_with_its_type(plain: Fairlane) -> None:
    @plain.task
    def double(number: int) -> int:
        return 2 * number

    handle = double.blocking.enqueue(21)
    assert handle.created
    assert handle.state() is JobState.PENDING
    position = handle.position()
    assert position is not None
    assert position.place == 1
    with pytest.raises(TimeoutError):
        handle.result(timeout=0.05)
    asyncio.run(_run_next(plain, b"42"))
    assert handle.result(timeout=30) == 42
    assert [update.state for update in handle.watch()] == [JobState.COMPLETED]
    assert plain.blocking.handle(handle.id, double).result() == 42
    again = handle.retry()
    assert again.job().retry_of == handle.id
    assert again.cancel().value == "cancelled"


def test_a_watch_that_is_left_early_leaves_nothing_running(plain: Fairlane) -> None:
    @plain.task
    def one() -> None: ...

    handle = one.blocking.enqueue()
    for update in handle.watch():
        assert update.state is JobState.PENDING
        break
    plain.blocking.close()


def test_many_and_reading_verbs_work_without_a_loop(plain: Fairlane) -> None:
    @plain.task
    def one(number: int) -> None: ...

    handles = plain.blocking.enqueue_many([one.call(n) for n in range(5)])
    assert len({handle.id for handle in handles}) == 5
    plain.blocking.pause("default")
    assert handles[0].why() == "queue default is paused"
    assert [queue.name for queue in plain.blocking.queues()] == ["default", "models"]
    assert plain.blocking.broadcast(one.call(1)).result(timeout=30) == {}


async def test_a_blocking_call_inside_an_event_loop_is_refused_and_stores_nothing(app: Fairlane) -> None:
    @app.task
    def one() -> None: ...

    with pytest.raises(FairlaneError, match="await"):
        one.blocking.enqueue()
    assert (await app.client.find()).jobs == ()
    handle = await asyncio.to_thread(one.blocking.enqueue)
    assert await asyncio.to_thread(handle.state) is JobState.PENDING


def test_several_threads_share_one_loop_thread(plain: Fairlane) -> None:
    @plain.task
    def one(number: int) -> None: ...

    before = set(threading.enumerate())
    threads = [threading.Thread(target=one.blocking.enqueue, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(plain.blocking.find().jobs) == 8
    assert sum(thread.name == "fairlane-blocking" for thread in set(threading.enumerate()) - before) == 1


def test_a_call_that_meets_a_stop_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = LoopThread()
    submit = asyncio.run_coroutine_threadsafe
    submitting, stopped, ended = threading.Event(), threading.Event(), threading.Event()

    async def leave_a_thread_behind() -> None:
        asyncio.get_running_loop().run_in_executor(None, ended.wait, 1.0)

    async def forever() -> None:
        await asyncio.sleep(3_600)

    def submit_late(work: Any, loop: asyncio.AbstractEventLoop) -> Any:
        """The thread is suspended just before it gives its work to the loop."""
        submitting.set()
        stopped.wait(0.3)
        return submit(work, loop)

    def call() -> None:
        with contextlib.suppress(CancelledError):
            thread.run(forever)

    thread.run(leave_a_thread_behind)
    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "run_coroutine_threadsafe", submit_late)
        caller = threading.Thread(target=call, daemon=True)
        caller.start()
        assert submitting.wait(30)
        thread.stop()
        stopped.set()
        caller.join(10)
    ended.set()
    assert not caller.is_alive(), "its work was given to a loop that was closed meanwhile"


def test_turns_run_one_after_the_other_across_threads(plain: Fairlane) -> None:
    inside: list[int] = []
    order: list[int] = []
    told: list[Position] = []

    def one(number: int) -> None:
        with plain.blocking.turn("flux", queue="models", on_position=told.append, timeout=60) as turn:
            inside.append(number)
            assert inside == [number]
            assert turn.fence >= 1
            assert not turn.lost
            order.append(number)
            inside.remove(number)

    threads = [threading.Thread(target=one, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(order) == [0, 1, 2, 3]


def test_a_turn_whose_body_raises_is_failed_and_the_error_goes_on(plain: Fairlane) -> None:
    with pytest.raises(ZeroDivisionError), plain.blocking.turn("flux", queue="models"):
        _ = 1 / 0
    [turn] = plain.blocking.find(queue="models").jobs
    assert turn.state is JobState.FAILED


def test_a_position_callback_may_use_the_client(plain: Fairlane) -> None:
    seen: list[int] = []
    began = threading.Event()

    def look(position: Position) -> None:
        seen.append(len(plain.blocking.find(queue="models").jobs))
        began.set()

    def wait() -> None:
        with plain.blocking.turn("flux", queue="models", on_position=look, timeout=60):
            pass

    other = threading.Thread(target=wait)
    with plain.blocking.turn("flux", queue="models"):
        other.start()
        assert began.wait(30)
    other.join(60)
    assert seen[0] == 2


def test_a_lane_that_is_held_is_known_in_blocking_code_too(plain: Fairlane) -> None:
    inner = plain.blocking.turn("flux", queue="models", timeout=30)
    with plain.blocking.turn("flux", queue="models"), pytest.raises(WouldDeadlock):
        inner.__enter__()
    with plain.blocking.turn("flux", queue="models", timeout=30):
        pass


PAIRS: list[tuple[type[Any], type[Any]]] = [
    (Client, BlockingClient),
    (Handle, BlockingHandle),
    (BroadcastHandle, BlockingBroadcastHandle),
]


def _verbs(kind: type[Any]) -> dict[str, Any]:
    return {name: getattr(kind, name) for name in dir(kind) if not name.startswith("_")}


@pytest.mark.parametrize(("is_async", "blocking"), PAIRS)
def test_both_have_the_same_verbs_with_the_same_parameters(is_async: type[Any], blocking: type[Any]) -> None:
    extra = {"turn", "close", "stop"} if blocking is BlockingClient else set()
    assert _verbs(blocking).keys() - extra == _verbs(is_async).keys()
    for name, verb in _verbs(is_async).items():
        other = _verbs(blocking)[name]
        if isinstance(verb, property):
            assert isinstance(other, property)
            continue
        assert not inspect.iscoroutinefunction(other)
        mine, theirs = inspect.signature(verb), inspect.signature(other)
        assert mine.parameters == theirs.parameters, name
        returned = str(mine.return_annotation).replace("AsyncGenerator[Update, None]", "Iterator[Update]")
        for word in ("BroadcastHandle[", "Handle["):
            if word in returned:
                returned = returned.replace(word, f"Blocking{word}")
                break
        assert returned == theirs.return_annotation, name


def test_the_blocking_turn_takes_what_the_async_one_takes() -> None:
    mine, theirs = inspect.signature(Fairlane.turn).parameters, inspect.signature(BlockingClient.turn).parameters
    assert [(p.name, p.kind, p.default) for p in mine.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]
