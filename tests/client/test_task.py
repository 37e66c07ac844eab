"""Tasks: names, options, calls, and what is rejected when one is created."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from fairlane import Fairlane
from fairlane.errors import InvalidInput
from fairlane.model.job import Priority
from fairlane.task import Registry, Task

app = Fairlane("sqlite:///never-opened.db")


@app.task(queue="images", lane="user:{user}", retries=5, priority="low", timeout=timedelta(minutes=2))
async def render(user: str, prompt: str = "a cat") -> str:
    """Draw."""
    return f"{user}: {prompt}"


@app.task
def plain(x: int) -> int:
    return x


def test_a_task_has_the_name_of_its_function_in_its_module() -> None:
    assert render.name == f"{__name__}.render"
    assert (render.__name__, render.__doc__) == ("render", "Draw.")


def test_a_call_carries_all_options() -> None:
    job = render.call("ann", prompt="a dog").job
    assert (job.queue, job.lane, job.retries, job.priority, job.timeout) == (
        "images",
        "user:ann",
        5,
        Priority.LOW,
        120.0,
    )
    assert job.payload == b'[["ann"],{"prompt":"a dog"}]'


def test_options_make_another_task_and_leave_the_first_alone() -> None:
    other = render.options(priority="high", lane="vip", delay=timedelta(seconds=30))
    job = other.call("ann").job
    assert (job.priority, job.lane, job.delay, job.retries) == (Priority.HIGH, "vip", 30.0, 5)
    assert render.call("ann").job.priority is Priority.LOW
    assert render.call("ann").job.lane == "user:ann"


def test_later_options_win_and_a_delay_replaces_a_moment() -> None:
    moment = datetime(2030, 1, 1, tzinfo=UTC)
    job = render.options(run_at=moment).call("ann").job
    assert (job.run_at, job.delay) == (moment.timestamp(), 0.0)
    again = render.options(run_at=moment).options(delay=5).call("ann").job
    assert (again.run_at, again.delay) == (None, 5)


def test_a_key_given_to_options_is_taken_as_it_stands() -> None:
    assert render.options(lane="{user.__class__}").call("ann").job.lane == "{user.__class__}"
    assert render.options(lane=None).call("ann").job.lane is None


def test_each_call_has_an_id_of_its_own_unless_one_is_given() -> None:
    assert render.call("ann").job.id != render.call("ann").job.id
    assert render.options(id="mine").call("ann").job.id == "mine"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"queue": "no spaces"}, "queue"),
        ({"priority": "urgent"}, "priority"),
        ({"retries": -1}, "retries"),
        ({"retries": 1.5}, "retries"),
        ({"timeout": 0}, "timeout"),
        ({"delay": -1}, "delay"),
        ({"lane": "user:{usr}"}, "lane"),
        ({"sticky": "{plan}"}, "sticky"),
        ({"unique_for": 5}, "unique_for"),
        ({"run_at": datetime(2030, 1, 1)}, "run_at"),  # noqa: DTZ001 - that is the point
        ({"cron": "never"}, "cron"),
        ({"every": 0.5}, "every"),
        ({"timezone": "Mars/Base"}, "timezone"),
        ({"cron": "* * * * *", "timezone": "Mars/Base"}, "timezone"),
        ({"colour": "red"}, "colour"),
        ({"name": "no spaces"}, "name"),
        ({"delay": 1, "run_at": 5.0}, "run_at"),
    ],
)
def test_a_wrong_setting_is_refused_at_decoration(options: dict[str, Any], field: str) -> None:
    async def work(user: str = "") -> None: ...

    with pytest.raises(InvalidInput) as refused:
        app.task(**options)(work)
    assert refused.value.field == field
    assert app.registry.get(f"{__name__}.work") is None


def test_a_cron_task_needs_a_default_for_every_parameter() -> None:
    async def work(user: str) -> None: ...

    with pytest.raises(InvalidInput, match=r"cron: .* every parameter needs a default"):
        app.task(cron="0 3 * * *")(work)


def test_a_child_process_must_be_able_to_find_its_function() -> None:
    def inner() -> None: ...

    async def waits() -> None: ...

    for settings in ({"isolate": True}, {"timeout": 5}):
        with pytest.raises(InvalidInput, match="child process"):
            app.task(**settings)(inner)
    assert app.task(timeout=5, name="waits")(waits).call().job.timeout == 5
    with pytest.raises(InvalidInput, match="child process"):
        app.task(name="inner")(inner).options(timeout=5)


def test_people_may_leave_the_module_out_where_that_is_clear() -> None:
    assert app.registry.find("render") is render
    registry = Registry()
    for name in ("one.send", "two.send"):
        registry.add(Task(app, plain.function, {"name": name}))
    with pytest.raises(InvalidInput, match=r"tasks: one.send, two.send"):
        registry.find("send")
    with pytest.raises(InvalidInput, match="not a task of this application"):
        registry.find("nothing")


@pytest.mark.parametrize("how", ["script", "module", "stdin"])
def test_a_task_of_the_main_program_is_named_as_others_import_it(tmp_path: Path, how: str) -> None:
    source = "\n".join(
        [
            "from fairlane import Fairlane",
            "app = Fairlane()",
            "@app.task",
            "async def hello() -> None: ...",
            "print(hello.name)",
        ]
    )
    (tmp_path / "shop.py").write_text(source)
    command = {"script": ["shop.py"], "module": ["-m", "shop"], "stdin": ["-"]}[how]
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, input=source, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ("__main__.hello" if how == "stdin" else "shop.hello")


def test_a_generator_is_no_task() -> None:
    def numbers() -> Any:
        yield 1

    async def later() -> Any:
        yield 1

    for function in (numbers, later):
        with pytest.raises(InvalidInput, match="a job has one result"):
            app.task(function)
