"""Hooks and logs of workers as real processes: a start hook that raises, and which jobs are logged."""

import json

import pytest

from tests.cli.conftest import EXAMPLES
from tests.cli.project import Project

BROKEN = """
from fairlane import Fairlane

app = Fairlane()

@app.on_worker_start
def connect(worker) -> None:
    raise ConnectionError("no database")

@app.task
async def hello() -> None: ...
"""


def test_a_worker_whose_start_hook_raises_reports_why_and_exits_with_1(project: Project) -> None:
    project.write("broken.py", BROKEN)
    worker = project.start("worker", "-A", "broken")
    _, output = worker.communicate(timeout=60)
    assert worker.returncode == 1
    assert 'raise ConnectionError("no database")' in output
    assert output.rstrip().endswith(
        "the worker does not start: its on_worker_start hook connect raised ConnectionError: no database"
    )
    assert project.read("workers", "--all")["workers"] == []


def test_the_example_of_hooks_works_as_described(project: Project) -> None:
    example = str(EXAMPLES / "hooks.py")
    ids = [project.read("enqueue", "-A", example, "count", what)["id"] for what in ("apples", "pears", "apples")]
    worker = project.start("worker", "-A", example, "--burst", "--slots", "1")
    _, output = worker.communicate(timeout=60)
    assert worker.returncode == 0, output
    assert [project.read("job", id)["result"] for id in ids] == [1, 1, 2]
    assert output.count(" hooks: hooks.count took 0.") == 3


@pytest.mark.parametrize(
    ("args", "environ", "completed", "failed"),
    [
        ((), {}, 1, 1),
        (("--log-level", "warning"), {}, 0, 1),
        (("-l", "INFO"), {"FAIRLANE_LOG_LEVEL": "error"}, 1, 1),
        ((), {"FAIRLANE_LOG_LEVEL": "Warning"}, 0, 1),
        (("-l", "critical"), {}, 0, 0),
    ],
    ids=["by default", "warning", "the option beats the variable", "by a variable", "critical"],
)
def test_the_level_determines_which_jobs_have_a_line(
    project: Project, args: tuple[str, ...], environ: dict[str, str], completed: int, failed: int
) -> None:
    project.good("enqueue", "-A", "shop", "render", "ann")
    project.good("enqueue", "-A", "shop", "spoil", "milk")
    worker = project.start("worker", "-A", "shop", "--burst", "--log-format", "json", *args, **environ)
    _, output = worker.communicate(timeout=60)
    assert worker.returncode == 0, output
    lines = [json.loads(line) for line in output.splitlines()]
    jobs = [line for line in lines if line["logger"] == "fairlane.worker.jobs"]
    assert [line["outcome"] for line in jobs].count("completed") == completed
    assert [line["exception"].endswith("ValueError: milk") for line in jobs if line["level"] == "error"] == [
        True
    ] * failed


def test_a_level_that_is_unknown_is_rejected(project: Project) -> None:
    assert "'loud' is not one of" in project.refused("worker", "-A", "shop", "--log-level", "loud")
    worker = project.start("worker", "-A", "shop", FAIRLANE_LOG_LEVEL="loud")
    _, output = worker.communicate(timeout=60)
    assert (worker.returncode, "FAIRLANE_LOG_LEVEL" in output) == (2, True)
