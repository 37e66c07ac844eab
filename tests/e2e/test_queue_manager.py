"""The example of a queue manager, run as its first lines say, while its leader and its Redis are killed."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from fairlane.model.job import Priority
from fairlane.store.deployment import split_redis

from .conftest import deployments
from .deployment import PostgresqlRedisDeployment
from .instances import ADDRESS
from .world import Stage

APP = "examples.queue_manager.queue_manager"
NOWHERE = "postgresql://127.0.0.1:1/nowhere"


@pytest.fixture
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    """A database with a Redis for high priority and one for the others."""
    with deployments("postgresql_redis") as make:
        yield Stage(request.node.name, tmp_path, make)


async def test_an_api_two_managers_and_workers_share_the_tasks(stage: Stage) -> None:
    async with stage.world() as world:
        assert isinstance(world.deployment, PostgresqlRedisDeployment)
        url, redis = split_redis(world.deployment.url)
        assert redis is not None
        env = {"FAIRLANE_URL": url} | {"FAIRLANE_REDIS_HIGH_URL": redis.high, "FAIRLANE_REDIS_LOW_URL": redis.low}
        managers = [world.fleet.manager(name=f"manager{n}", env=env) for n in range(2)]
        workers = [world.fleet.worker("-c", "4", "--no-manager", app=APP, name=f"worker{n}", env=env) for n in range(2)]
        api = world.fleet.program("fairlane", "serve", "-A", APP, "--port", "0", name="api", env=env)
        await world.ready(*managers, *workers)

        async def address() -> str:
            found = ADDRESS.search(api.output.read_text())
            return found[1] if found else ""

        async with httpx.AsyncClient(base_url=await world.until(address, "the API listens"), timeout=30) as http:
            body = {"task": "execute", "args": ["42"], "options": {"priority": "high"}}
            sent = await http.post("/api/v1/jobs", json=body)
            assert sent.status_code == 202, sent.text
            answer = await http.get(f"/api/v1/jobs/{sent.json()['id']}/result?wait=20")
            assert answer.json()["result"] == "task 42 is done"

            leader = await world.client.leader()
            assert leader is not None
            for manager in managers:
                if (await world.session_of(manager)).id == leader.session:
                    manager.kill()
            world.deployment.redis[1].kill()
            pushing = world.fleet.program(APP, "20", name="pushing", env=env)
            assert await world.gone(pushing) == [0]
            assert sorted(pushing.output.read_text().splitlines()) == sorted(f"task {n} is done" for n in range(20))


async def test_push_task_says_whether_the_task_is_stored_and_never_raises(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage.world() as world:
        monkeypatch.setenv("FAIRLANE_URL", world.deployment.url)
        there = runpy.run_module(APP)
        monkeypatch.setenv("FAIRLANE_URL", NOWHERE)
        nowhere = runpy.run_module(APP)
        try:
            assert await there["push_task"]("7", "high") is True
            assert await there["push_task"]("8", "") is True
            # The same task again is the same job, and other content under its id is refused.
            assert await there["push_task"]("7", "high") is True
            assert await there["push_task"]("7", "low") is False
            assert await nowhere["push_task"]("9") is False
        finally:
            await there["app"].close()
            await nowhere["app"].close()
        jobs = {job.id: job for job in await world.jobs()}
        assert {id: job.priority for id, job in jobs.items()} == {"task-7": Priority.HIGH, "task-8": Priority.LOW}
        assert jobs["task-7"].payload == b'[["7"],{}]'
