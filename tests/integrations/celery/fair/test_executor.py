"""The executor of a Celery worker without one: which of several reports of an end is written."""

import asyncio
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from billiard.einfo import ExceptionInfo
from celery import Celery
from celery.exceptions import TaskRevokedError
from celery.worker.request import create_request_cls

from fairlane import Fairlane
from fairlane.integrations.celery import Fair
from fairlane.integrations.celery.executor import CeleryExecutor, Delivery
from fairlane.integrations.celery.job_requests import FairRequest
from fairlane.integrations.celery.publishing import KeptRetry, captured
from fairlane.model import states
from fairlane.model.job import Reason
from fairlane.model.states import Move, Transition
from fairlane.worker.run import Run, Stop
from tests.worker.apart import claimed

HOST: Any = SimpleNamespace(knows=lambda task: True, deliver=lambda delivery: None, in_main=lambda call: None)


@pytest.mark.parametrize("timed_out", [False, True])
def test_a_worker_that_leaves_does_not_forget_that_a_task_has_timed_out(timed_out: bool) -> None:
    """The process of such a task is about to be killed; the pool has stored its result already."""
    written: list[Transition | None] = []

    async def scene() -> None:
        executor = CeleryExecutor(lambda run, transition: written.append(transition), HOST, 60.0)
        run = Run(claimed())
        executor.start_all([run])
        [delivery] = executor.deliveries()
        delivery.request = SimpleNamespace(task=SimpleNamespace(acks_late=True))
        delivery.accepted()
        if timed_out:
            _time_out(delivery)
            await asyncio.sleep(0)
        executor.abandon(run)
        executor.abandon(run)

    asyncio.run(scene())
    assert [each.move for each in written if each] == [Move.FAIL if timed_out else Move.HAND_BACK]


def _time_out(delivery: Delivery) -> None:
    # The process is this one, so it is there.
    delivery.end_without(os.getpid(), states.fail(delivery.run.claimed.held, Reason.TIMEOUT, "too long"))


@pytest.mark.parametrize("why", [Stop.LOST, Stop.CONTACT])
def test_a_claim_that_waits_in_celery_is_withdrawn(why: Stop) -> None:
    """It waits for a place in the pool or for its rate, and runs elsewhere when its turn comes."""
    written: list[Transition | None] = []
    app, payload = _message()
    pool = SimpleNamespace(apply_async=lambda *_, **__: pytest.fail("it has run"))

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        host: Any = SimpleNamespace(
            **vars(HOST) | {"in_main": loop.call_soon, "pool": pool, "queue_of": lambda job: "q"}
        )
        executor = CeleryExecutor(lambda run, transition: written.append(transition), host, 60.0)
        run = Run(claimed(payload=payload))
        executor.start_all([run])
        [delivery] = executor.deliveries()
        message = executor.message(delivery, None)
        request = create_request_cls(FairRequest, app.tasks["app.task"], pool, "host", None, app=app)(message, app=app)
        executor.stop(run, why)
        async with asyncio.timeout(10):
            while not written:
                await asyncio.sleep(0)
        # The worker of Celery releases its place then.
        with pytest.raises(TaskRevokedError):
            request.execute_using_pool(pool)

    asyncio.run(scene())
    assert [each and each.move for each in written] == [None if why is Stop.LOST else Move.TAKE_BACK]


@pytest.mark.parametrize(
    ("id", "attempt", "retries"),
    [("first", 1, 3), ("first.1", 1, 3), ("first/0", 1, 3), ("first0", 1, 0), ("another", 1, 0), ("another", 2, 3)],
)
def test_a_job_that_an_operator_retries_begins_anew(id: str, attempt: int, retries: int) -> None:
    """It has another id than its message, which is the last one that Celery has retried. Later runs are Celery's."""
    app, _ = _message()
    with captured() as publishes:
        app.send_task("app.task", task_id="first", retries=3, expires=60)

    async def scene() -> None:
        host: Any = SimpleNamespace(**vars(HOST) | {"queue_of": lambda job: "q"})
        executor = CeleryExecutor(lambda run, transition: None, host, 60.0)
        executor.start_all([Run(claimed(payload=publishes[0].payload, id=id, attempt=attempt))])
        [delivery] = executor.deliveries()
        message = executor.message(delivery, None)
        assert message is not None
        assert message.headers["retries"] == retries
        assert (message.headers["expires"] is None) is (retries == 0)

    asyncio.run(scene())


@pytest.fixture
def far_east(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The clock of the machine shows another time than UTC."""
    monkeypatch.setenv("TZ", "XXX-14")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("far_east")
def test_a_retry_at_a_time_without_a_zone_is_in_utc() -> None:
    """Celery reads `eta` like this, whatever the zone of the machine is."""
    written: list[Transition | None] = []
    app, payload = _message()
    eta = datetime.now(UTC).replace(tzinfo=None) + timedelta(seconds=600)
    with captured() as publishes:
        app.send_task("app.task", eta=eta)
    ending = KeptRetry("again", None, eta)
    ending.payload = publishes[0].payload

    async def scene() -> None:
        pool = SimpleNamespace(apply_async=lambda *_, **__: None)
        host: Any = SimpleNamespace(**vars(HOST) | {"pool": pool, "queue_of": lambda job: "q"})
        executor = CeleryExecutor(lambda run, transition: written.append(transition), host, 60.0)
        executor.start_all([Run(claimed(payload=payload))])
        [delivery] = executor.deliveries()
        message = executor.message(delivery, None)
        request = create_request_cls(FairRequest, app.tasks["app.task"], pool, "host", None, app=app)(message, app=app)
        try:
            raise ending
        except KeptRetry:
            request.on_failure(ExceptionInfo(), return_ok=True)
        async with asyncio.timeout(10):
            while not written:
                await asyncio.sleep(0)

    asyncio.run(scene())
    [transition] = written
    assert transition is not None
    assert transition.move is Move.RETRY
    assert 0 < transition.delay <= 600


def _message() -> tuple[Celery, bytes]:
    """An application, and a message of one of its tasks."""
    app = Celery("app", broker="redis://", set_as_current=False)
    Fair(app, Fairlane("sqlite:///never.db"))

    @app.task(shared=False, name="app.task")
    def task() -> None:
        """Nothing."""

    with captured() as publishes:
        app.send_task("app.task")
    return app, publishes[0].payload
