"""The slots, priorities and settings of complete instances, through HTTP."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from fairlane import InvalidInput, NotFound
from fairlane.http import Client
from fairlane.model.job import Priority
from fairlane.task import PriorityWord
from tests.sizes import sized

from . import tasks
from .fleet import Process
from .instances import Site, sites
from .ledger import BEGIN, most_at_once
from .world import Stage, World, play_on_all

MANY = sized(300, 100_000)
"""Submissions that must have as many ids."""


async def test_a_submission_is_reported_in_the_old_words(stage: Stage) -> None:
    async with stage.world() as world, sites(world) as [site]:
        answer = await site.http.get("/task")
        assert answer.status_code == 200
        sent = answer.json()
        assert (sent["status"], sent["priority"]) == ("queued", "low")
        assert abs(sent["submitted_at"] - (await world.client.job(sent["id"])).enqueued_at) < 0.001
        told: list[dict[str, object]] = []

        async def ended() -> bool:
            status = await site.status(sent["id"])
            if not told or told[-1]["status"] != status["status"]:
                told.append(status)
            return bool(status["status"] == "completed")

        await world.until(ended, "the job is completed")
        # "queued" may be over before the first look.
        assert [status["status"] for status in told][-2:] == ["processing", "completed"]
        assert told[-1]["worker"] == told[-2]["worker"] == "default/0"
        assert 0.3 <= float(str(told[-1]["latency"])) < 30.0
        assert told[-2]["latency"] is None


async def test_refusals_have_a_body_and_store_nothing(stage: Stage) -> None:
    async with stage.world() as world, sites(world) as [site]:
        before = await world.jobs()
        for path, status in [
            ("/task/unknown", 404),
            ("/task?priority=urgent", 422),
            ("/task?priority=normal", 422),
            ("/task?priority=", 422),
            ("/task?priority=high&priority=low", 422),
            ("/task?prio=high", 422),
        ]:
            answer = await site.http.get(path)
            assert answer.status_code == status, path
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.json()["detail"]
        with pytest.raises(InvalidInput, match="priority"):
            await site.client.send("tests.e2e.tasks.noop", priority="urgent")  # type: ignore[arg-type]  # the mistake
        assert (await site.http.post("/task")).status_code == 405
        assert await world.jobs() == before
        # Correct: the native API has three priorities, and the middle one is the default.
        plain = await site.client.enqueue(tasks.noop)
        assert (await plain.job()).priority is Priority.NORMAL


@pytest.mark.timeout(sized(120, 1_800))
async def test_every_submission_has_an_id_of_its_own(stage: Stage) -> None:
    async with stage.world() as world, sites(world, env={"E2E_WORK_SECONDS": "0"}) as [site]:
        found = await asyncio.gather(*(site.submit_many(MANY // 20) for _ in range(20)))
        assert len({id for ids in found for id in ids}) == MANY


async def hold(site: Site, go: Path, count: int, priority: PriorityWord) -> list[str]:
    """Submit jobs that run until a file is there, one after the other."""
    held = tasks.hold.options(priority=priority)
    return [(await site.client.enqueue(held, str(go))).id for _ in range(count)]


async def test_one_instance_keeps_to_its_slots_and_reservation(stages: dict[str, Stage]) -> None:
    """Bodies run until a file exists, so that slots are free or taken however fast the machine is."""

    async def scenario(world: World) -> None:
        go, again = world.file("go"), world.file("again")
        async with sites(world, env={"FAIRLANE_MAX_CONCURRENT_TASKS": "3", "HIGH_PRIORITY_RESERVED": "1"}) as [site]:
            low = await hold(site, go, 5, "low")
            await world.began(*low[:2])
            urgent = await site.submit("high")
            await world.final(urgent)
            assert not [entry for entry in world.ledger.entries() if entry.job != urgent and entry.event != BEGIN]
            go.touch()
            await world.final(*low)
            assert world.ledger.most_at_once(lambda e: e.priority == "low") == 2
            assert world.ledger.most_at_once() == 3
            # Long enough without work that polls, renewals and sweeps have happened several times.
            await asyncio.sleep(2.5)
            high = await hold(site, again, 3, "high")
            await world.began(*high)
            again.touch()
            await world.final(*high)
            assert world.ledger.most_at_once(lambda e: e.job in high) == 3

    await play_on_all(stages, scenario, times=1)


async def test_three_instances_keep_to_their_slots_together(stage: Stage) -> None:
    async with stage.world() as world, sites(world, 3) as those:
        go = world.file("go")

        async def begun(count: int) -> None:
            async def enough() -> bool:
                return len([entry for entry in world.ledger.entries() if entry.event == BEGIN]) >= count

            await world.until(enough, f"{count} jobs have begun")

        low = [id for site in those for id in await hold(site, go, 10, "low")]
        await begun(6)
        high = [id for site in those for id in await hold(site, go, 5, "high")]
        await begun(9)
        go.touch()
        await world.final(*low, *high)
        assert world.ledger.most_at_once(lambda e: e.priority == "low") == 6
        assert world.ledger.most_at_once() == 9
        for site in those:
            own = [entry for entry in world.ledger.entries() if entry.worker == site.process.name]
            assert most_at_once(own) == 3
            assert most_at_once(e for e in own if e.priority == "low") == 2
        assert set(world.ledger.starts().values()) == {1}


async def test_an_urgent_job_starts_next_whatever_waits(stage: Stage) -> None:
    async with stage.world() as world:
        go = world.file("go")
        held = [tasks.hold.options(priority="low").call(str(go)) for _ in range(2)]
        await world.client.enqueue_many(held)
        await world.client.enqueue_many([tasks.sleep.options(priority="low").call(0.2) for _ in range(5_000)])
        async with sites(world) as [site]:
            running = [call.job.id for call in held]
            await world.began(*running)
            urgent = await site.submit("high")
            await world.began(urgent)
            # Its slot is free, so it does not wait for the end of another.
            assert [entry.job for entry in world.ledger.entries()] == [*running, urgent]
            go.touch()


async def test_low_work_keeps_its_share(stage: Stage) -> None:
    async with stage.world() as world:
        low = await world.client.enqueue_many([tasks.sleep.options(priority="low").call(0.01) for _ in range(30)])
        await world.client.enqueue_many([tasks.sleep.options(priority="high").call(0.01) for _ in range(200)])
        async with sites(world, env={"MAX_CONCURRENT_TASKS": "2", "HIGH_PRIORITY_RESERVED": "0"}):

            async def enough() -> bool:
                return len(world.ledger.begins()) >= 150

            await world.until(enough, "150 jobs have started")
        ids = {handle.id for handle in low}
        share = sum(entry.job in ids for entry in world.ledger.begins()[:150])
        assert 14 <= share <= 30


async def test_code_without_an_event_loop_has_the_same_handles(stage: Stage) -> None:
    async with stage.world() as world, sites(world) as [site]:

        def use() -> list[Any]:
            with Client(site.address) as client:
                handle = client.enqueue(tasks.sleep, 0.1)
                updates = [update.state.value for update in handle.watch()]
                again = handle.retry()
                many = client.enqueue_many([tasks.sleep.call(0.0) for _ in range(3)])
                results = [handle.result(timeout=30), again.result(timeout=30), *(h.result(timeout=30) for h in many)]
                with pytest.raises(NotFound):
                    client.handle("unknown").why()
                return [updates[-1], handle.position(), handle.why(), *results]

        assert await asyncio.to_thread(use) == ["completed", None, "completed", 0.1, 0.1, 0.0, 0.0, 0.0]


async def test_a_stop_lets_running_jobs_finish(stage: Stage) -> None:
    async with stage.world() as world, sites(world, env={"E2E_WORK_SECONDS": "1"}) as [site]:
        running = await site.submit()
        await world.began(running)
        site.process.stop()
        await world.gone(site.process)
        job = await world.client.job(running)
        assert (job.state.value, job.attempt) == ("completed", 1)
        assert not [s for s in await world.client.sessions() if s.state.value == "live"], "it did not sign off"


async def test_a_second_signal_hands_back_what_runs(stage: Stage) -> None:
    async with stage.world() as world, sites(world, env={"E2E_WORK_SECONDS": "60"}) as [site]:
        running = await site.submit()
        await world.began(running)
        site.process.stop()
        await asyncio.sleep(0.5)
        assert site.process.ended is None
        site.process.stop()
        await world.gone(site.process)
        job = await world.client.job(running)
        assert (job.state.value, job.attempts[-1].outcome) == ("pending", "handed_back")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"MAX_CONCURRENT_TASKS": "0"}, "MAX_CONCURRENT_TASKS"),
        ({"MAX_CONCURRENT_TASKS": "three"}, "MAX_CONCURRENT_TASKS"),
        ({"MAX_CONCURRENT_TASKS": "3", "HIGH_PRIORITY_RESERVED": "-1"}, "HIGH_PRIORITY_RESERVED"),
        ({"MAX_CONCURRENT_TASKS": "3", "HIGH_PRIORITY_RESERVED": "3"}, "HIGH_PRIORITY_RESERVED"),
        ({"FAIRLANE_MAX_CONCURRENT_TASKS": "0", "MAX_CONCURRENT_TASKS": "3"}, "FAIRLANE_MAX_CONCURRENT_TASKS"),
        ({"FAIRLANE_HIGH_PRIORITY_RESERVED": "20"}, "FAIRLANE_HIGH_PRIORITY_RESERVED"),
    ],
)
def test_bad_settings_keep_an_instance_from_starting(settings: dict[str, str], named: str, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FAIRLANE")}
    environment |= {"FAIRLANE_URL": f"sqlite:///{tmp_path}/fairlane.db", "E2E_PROCESS": "web"} | settings
    process = Process("web", ["uvicorn", "tests.e2e.web:web", "--port", "0"], environment, tmp_path / "log")
    process.wait()
    assert process.ended == 1
    last = (tmp_path / "log").read_text().strip().splitlines()[-1]
    assert "InvalidInput" in last
    assert f"{named}: " in last
    assert not (tmp_path / "fairlane.db").exists()
