"""The application object: what it declares, when it opens the store, and that it survives a fork."""

from __future__ import annotations

import asyncio
import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fairlane import Fairlane, FairlaneError, InvalidInput, Reserved, Settings
from fairlane.events import Called, Event, Events
from fairlane.model.schedule import job_from
from fairlane.model.settings import LaneRule, QueueSettings

from .conftest import QUICK


@pytest.fixture
def unopened(url: str) -> Fairlane:
    """An application for tests that have no event loop."""
    return Fairlane(settings=Settings(url=url, intervals=QUICK))


async def _stored(app: Fairlane, queue: str) -> QueueSettings:
    [reading] = [q for q in await app.client.queues() if q.name == queue]
    return reading.settings


def test_the_store_is_that_of_the_environment_else_a_file_beside_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FAIRLANE_URL", raising=False)
    assert Fairlane().settings.url == "sqlite:///fairlane.db"
    monkeypatch.setenv("FAIRLANE_URL", "sqlite:///other.db")
    assert Fairlane().settings.url == "sqlite:///other.db"
    assert Fairlane("sqlite:///mine.db").settings.url == "sqlite:///mine.db"
    assert Fairlane(settings=Settings(url="sqlite:///set.db")).settings.url == "sqlite:///set.db"


def test_a_bad_environment_is_reported_when_the_application_is_created(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRLANE_MAX_CONCURRENT_TASKS", "0")
    with pytest.raises(InvalidInput, match="FAIRLANE_MAX_CONCURRENT_TASKS"):
        Fairlane()


def test_making_an_application_touches_no_store_and_shows_no_password(tmp_path: Path) -> None:
    app = Fairlane(f"sqlite:///{tmp_path / 'fairlane.db'}")
    app.queue("images", limit=4)
    assert list(tmp_path.iterdir()) == []
    assert "s3cr3t" not in repr(Fairlane("postgresql://ann:s3cr3t@db/jobs"))


async def test_an_unknown_kind_of_store_is_reported_at_the_first_call_and_again() -> None:
    app = Fairlane("mystery://somewhere")
    for _ in range(2):
        with pytest.raises(InvalidInput, match="mystery"):
            await app.client.queues()


async def test_declarations_reach_the_store_when_it_is_opened(app: Fairlane) -> None:
    app.queue("images", limit=4, reserved={"high": 1}, max_pending=100).lane("user:*", weight=2)
    app.queue("models", lanes=["flux", "sdxl"]).lane("*", limit=1)
    app.queue("models").lane("sdxl", limit=2)
    assert await _stored(app, "images") == QueueSettings(
        limit=4, reserved=Reserved(high=1), max_pending=100, lanes=(LaneRule(pattern="user:*", weight=2),)
    )
    assert await _stored(app, "models") == QueueSettings(
        closed=("flux", "sdxl"), lanes=(LaneRule(pattern="*", limit=1), LaneRule(pattern="sdxl", limit=2))
    )
    assert app.queue_names() == {"images", "models"}


async def test_an_older_deployment_does_not_undo_a_newer_one(url: str) -> None:
    for version, limit, counts in ((2, 8, 8), (1, 4, 8), (3, 2, 2)):
        app = Fairlane(settings=Settings(url=url, intervals=QUICK), version=version)
        app.queue("images", limit=limit)
        assert (await _stored(app, "images")).limit == counts
        await app.close()


async def test_a_declaration_that_would_come_too_late_is_refused(app: Fairlane) -> None:
    await app.client.queues()
    with pytest.raises(FairlaneError, match="before the first call"):
        app.queue("images", limit=4)


@pytest.mark.parametrize(
    ("declare", "field"),
    [
        (lambda app: app.queue("a b"), "queue"),
        (lambda app: app.queue("q", limit=0), "limit"),
        (lambda app: app.queue("q", limit=2, reserved={"high": 2}), "reserved"),
        (lambda app: app.queue("q", limit=2, reserved={"hihg": 1}), "reserved"),
        (lambda app: app.queue("q", reserved={"high": 1}), "reserved"),
        (lambda app: app.queue("q", lanes="flux"), "lanes"),
        (lambda app: app.queue("q", max_pending=0), "max_pending"),
        (lambda app: app.queue("q", limit=2) and app.queue("q", limit=3), "limit"),
        (lambda app: app.queue("q").lane("a*b"), "lane pattern"),
        (lambda app: app.queue("q").lane("a", limit=0), "limit"),
        (lambda app: app.queue("q").lane("a", ordered=True), "ordered"),
        (lambda app: app.queue("q").lane("a").lane("a"), "lanes"),
        (lambda app: app.queue("q").lane("a", weight=0), "weight"),
    ],
)
def test_a_wrong_declaration_is_refused_where_it_is_written(unopened: Fairlane, declare: Any, field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        declare(unopened)
    assert refused.value.field == field


def test_tasks_are_registered_bare_and_with_settings(unopened: Fairlane) -> None:
    @unopened.task
    async def one() -> None: ...

    @unopened.task(queue="images", name="two", retries=0)
    def other() -> None: ...

    assert {task.name for task in unopened.registry} == {f"{__name__}.one", "two"}
    assert (one.is_async, other.is_async) == (True, False)
    assert unopened.queue_names() == {"default", "images"}


@pytest.mark.parametrize("thing", [7, "name", object(), functools.partial(print)])
def test_only_functions_become_tasks(unopened: Fairlane, thing: Any) -> None:
    with pytest.raises(InvalidInput, match="function"):
        unopened.task(thing)


def test_two_tasks_of_one_name_are_refused(unopened: Fairlane) -> None:
    @unopened.task(name="same")
    def one() -> None: ...

    with pytest.raises(InvalidInput, match="same"):

        @unopened.task(name="same")
        def two() -> None: ...


def test_tasks_with_a_timetable_are_the_schedules(unopened: Fairlane) -> None:
    @unopened.task(name="tidy", cron="*/5 * * * *", timezone="Europe/Berlin", queue="night")
    async def tidy(depth: int = 3) -> None: ...

    @unopened.task(name="beat", every=60)
    def beat() -> None: ...

    @unopened.task
    def other() -> None: ...

    tidying, beating = unopened.schedules()
    assert (tidying.name, tidying.timetable.cron, beating.timetable.every) == ("tidy", "*/5 * * * *", 60)
    job = job_from(tidying.job, "tidy", 300.0)
    assert (job.task, job.queue, job.payload) == ("tidy", "night", b"[[],{}]")
    assert unopened.schedules() == [tidying, beating], "declaring them again changes nothing"


async def test_every_call_emits_its_events(url: str) -> None:
    received: list[Event] = []
    events = Events()
    events.subscribe(received.append)
    async with Fairlane(settings=Settings(url=url, intervals=QUICK), events=events) as app:
        await app.client.queues()
    assert "queues" in [event.verb for event in received if isinstance(event, Called)]


async def test_a_closed_application_opens_again(app: Fairlane) -> None:
    @app.task
    async def one() -> None: ...

    handle = await one.enqueue()
    await app.close()
    await app.close()
    assert (await handle.job()).id == handle.id


def test_every_event_loop_may_use_one_application(unopened: Fairlane) -> None:
    @unopened.task
    async def one() -> None: ...

    async def send() -> str:
        return (await one.enqueue()).id

    first, second = asyncio.run(send()), asyncio.run(send())
    assert asyncio.run(unopened.client.job(first)).id != asyncio.run(unopened.client.job(second)).id
    asyncio.run(unopened.close())


FORKING = """
import asyncio, os, sys
from msgspec.structs import replace
from fairlane import Fairlane, Settings, Intervals

# The lease is not scaled: a busy machine can stop a process for longer than a tenth of it.
intervals = replace(Intervals().scaled(0.1), lease=15.0)
app = Fairlane(settings=Settings(url=sys.argv[1], intervals=intervals))
app.queue("models").lane("flux", limit=1)

@app.task(name="one")
async def one(number: int) -> None: ...

async def work(number):
    await one.enqueue(number)
    async with app.turn("flux", queue="models", timeout=30):
        pass

one.blocking.enqueue(1)
asyncio.run(work(2))
with app.blocking.turn("flux", queue="models", timeout=30):
    pass
child = os.fork()
if child == 0:
    one.blocking.enqueue(3)
    asyncio.run(work(4))
    with app.blocking.turn("flux", queue="models", timeout=30):
        pass
    app.blocking.close()
    os._exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
one.blocking.enqueue(5)
app.blocking.close()
"""


def test_an_application_that_was_used_is_usable_on_both_sides_of_a_fork(url: str, tmp_path: Path) -> None:
    script = tmp_path / "forking.py"
    script.write_text(FORKING)
    subprocess.run([sys.executable, "-X", "dev", str(script), url], check=True, timeout=90)
    app = Fairlane(url)
    jobs = app.blocking.find(task="one").jobs
    assert sorted(msgspec.json.decode(job.payload)[0][0] for job in jobs) == [1, 2, 3, 4, 5]
    turns = app.blocking.find(queue="models").jobs
    assert [turn.state.value for turn in turns] == ["completed"] * 4
    assert {session.state.value for session in app.blocking.sessions()} == {"ended"}
    app.blocking.close()


def test_importing_the_package_imports_no_extra_and_no_backend() -> None:
    extras = ("opentelemetry", "prometheus_client", "click", "rich", "sqlite3")
    code = f"import sys, fairlane; print([m for m in {extras} if m in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert printed.stdout.strip() == "[]"
