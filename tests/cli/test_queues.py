"""Commands that show and steer queues, workers and bindings."""

import asyncio
from typing import Any

import pytest

from fairlane.model.ids import new_id
from fairlane.model.session import NewSession, SessionKind
from fairlane.model.slots import Slots
from fairlane.store.port import Store
from tests.cli.project import Project


def _register(project: Project, **fields: Any) -> None:
    """A worker that is there for as long as its lease holds."""

    async def register(store: Store) -> None:
        given = {"queues": ("default",), "slots": Slots(total=4), "lease": 600.0, **fields}
        await store.register(NewSession(id=new_id(), kind=SessionKind.WORKER, **given))

    asyncio.run(project.with_store(register))


@pytest.mark.parametrize(
    ("command", "key"),
    [
        (("queues",), "queues"),
        (("lanes", "default"), "lanes"),
        (("workers",), "workers"),
        (("workers", "--all"), "workers"),
        (("bindings",), "bindings"),
        (("jobs",), "jobs"),
        (("status",), "queues"),
        (("top",), "lanes"),
    ],
)
def test_every_list_is_a_document_and_a_table(project: Project, command: tuple[str, ...], key: str) -> None:
    _register(project)
    project.good("enqueue", "any.task", "--lane", "user:ann", "--sticky", "plan-7")
    document = project.read(*command)
    assert isinstance(document[key], list)
    assert document[key]
    assert project.good(*command).strip()


@pytest.mark.usefixtures("every_store")
def test_lists_of_an_empty_store_say_that_there_is_nothing(project: Project) -> None:
    for command in ("queues", "workers", "bindings", "jobs", "status", "top"):
        assert "no " in project.good(command)


@pytest.mark.usefixtures("every_store")
def test_queues_count_by_state(project: Project) -> None:
    project.good("enqueue", "any.task", "--queue", "mail")
    project.good("enqueue", "any.task", "--queue", "mail", "--delay", "60", "--priority", "high")
    [queue] = project.read("queues")["queues"]
    assert {"name": "mail", "pending": 1, "scheduled": 1, "workers": 0, "paused": False}.items() <= queue.items()
    assert queue["classes"]["high"]["scheduled"] == 1


@pytest.mark.usefixtures("every_store")
def test_lanes_come_longest_first(project: Project) -> None:
    for lane, count in (("a", 1), ("b", 3), ("c", 2)):
        for _ in range(count):
            project.good("enqueue", "any.task", "--lane", lane)
    lanes = project.read("lanes", "default")["lanes"]
    assert [(lane["lane"], lane["pending"]) for lane in lanes] == [("b", 3), ("c", 2), ("a", 1)]
    assert "nope" in project.refused("lanes", "nope", code=1)


@pytest.mark.usefixtures("every_store")
def test_a_queue_is_paused_and_resumed(project: Project) -> None:
    id = project.read("enqueue", "any.task")["id"]
    assert project.read("pause", "default") == {"queue": "default", "lane": None, "paused": True}
    assert project.read("queues")["queues"][0]["paused"]
    assert "paused" in project.read("job", id)["why"]
    assert "resume default" in project.good("pause", "default")
    project.good("resume", "default")
    assert not project.read("queues")["queues"][0]["paused"]
    assert "nope" in project.refused("pause", "nope", code=1)


@pytest.mark.usefixtures("every_store")
def test_one_lane_is_paused_and_resumed(project: Project) -> None:
    project.good("enqueue", "any.task", "--lane", "user:ann")
    project.good("pause", "default", "--lane", "user:ann")
    [lane] = project.read("lanes", "default")["lanes"]
    assert lane["paused"]
    project.good("resume", "default", "--lane", "user:ann")
    [lane] = project.read("lanes", "default")["lanes"]
    assert not lane["paused"]


@pytest.mark.usefixtures("every_store")
def test_a_binding_is_shown_and_released(project: Project) -> None:
    _register(project, index=3)
    id = project.read("enqueue", "any.task", "--sticky", "plan-7")["id"]
    [binding] = project.read("bindings", "--key", "plan-7")["bindings"]
    assert (binding["pool"], binding["index"], binding["state"]) == ("default", 3, "open")
    assert project.read("release", "plan-7")["answer"] == "draining"
    project.good("cancel", id)
    assert project.read("release", "plan-7")["answer"] in ("released", "nothing")
    assert project.read("release", "unknown")["answer"] == "nothing"


@pytest.mark.usefixtures("every_store")
def test_workers_show_their_place_and_slots(project: Project) -> None:
    _register(project, index=3, queues=("images", "mail"))
    [worker] = project.read("workers")["workers"]
    assert (worker["worker"], worker["queues"], worker["running"]) == ("default/3", ["images", "mail"], 0)
    assert worker["slots"]["total"] == 4
    assert "default/3" in project.good("workers")


@pytest.mark.usefixtures("every_store")
def test_migrating_twice_is_harmless(project: Project) -> None:
    assert project.read("migrate") == project.read("migrate")
    assert "schema version" in project.good("migrate")


def test_a_small_bench_measures_rates(project: Project) -> None:
    found = project.read("bench", "--jobs", "200", "-c", "10")
    assert found["jobs"] == 200
    assert min(found["enqueue_per_second"], found["run_per_second"], found["round_trip_seconds"]) > 0
    assert project.read("queues")["queues"] == []


def test_a_bench_on_a_real_store_leaves_other_work_alone(project: Project) -> None:
    id = project.read("enqueue", "any.task")["id"]
    project.good("bench", "--jobs", "50", "--url", "sqlite:///fairlane.db")
    assert project.read("job", id)["state"] == "pending"
