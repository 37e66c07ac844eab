"""Commands about many jobs, limits, schedules and tasks, and commands that only read and leave nothing behind."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from fairlane.cli.selection import Age
from fairlane.errors import StoreUnavailable
from fairlane.model.ids import retry_id
from fairlane.model.job import JobState, NewJob
from fairlane.model.schedule import FORGOTTEN_SECONDS
from fairlane.store.port import Store
from fairlane.store.sqlite.store import SqliteStore

from .project import Project


def fill(project: Project, count: int, queue: str = "default", lane: str | None = None) -> None:
    """Send jobs that wait."""
    jobs = [NewJob(id=f"job-{n}", task="any.task", queue=queue, lane=lane) for n in range(count)]

    async def send(store: Store) -> None:
        for start in range(0, count, 1_000):
            await store.enqueue(jobs[start : start + 1_000])

    asyncio.run(project.with_store(send))


# -- many jobs -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("every_store")
def test_jobs_are_cancelled_retried_and_forgotten_by_a_selection(project: Project) -> None:
    fill(project, 12, queue="images", lane="user:ann")
    project.good("enqueue", "any.task", "--queue", "images", "--lane", "user:bob")
    where = ("--queue", "images", "--lane", "user:ann")

    dry = project.read("cancel", *where, "--dry-run")
    assert (dry["matched"], dry["cancelled"], dry["dry_run"], len(dry["jobs"])) == (12, 0, True, 10)
    assert project.read("cancel", *where, "--yes")["cancelled"] == 12
    assert len(project.read("jobs", "--state", "pending")["jobs"]) == 1

    output = project.read("retry", "--state", "cancelled", "--task", "any.task", "--yes")
    assert (output["matched"], output["retried"], output["unchanged"]) == (12, 12, {})
    output = project.read("retry", "--state", "cancelled", "--task", "any.task", "--yes")
    assert (output["retried"], output["unchanged"]) == (0, {"already_retried": 12})

    assert project.read("purge", *where, "--yes")["forgotten"] == 12
    assert project.read("purge", *where, "--yes", "--cancel-waiting")["forgotten"] == 12
    assert [job["lane"] for job in project.read("jobs")["jobs"]] == ["user:bob"]


def test_a_dry_run_shows_how_many_and_shows_some(project: Project) -> None:
    fill(project, 12)
    output = project.good("cancel", "--all", "--dry-run")
    assert "12 jobs would be cancelled" in output
    assert "job-11" in output
    assert "and 2 more" in output


def test_a_dry_run_and_the_question_leave_out_what_was_already_retried(project: Project) -> None:
    fill(project, 3)
    project.good("cancel", "job-0", "job-1", "job-2")
    where = ("retry", "--state", "cancelled")
    assert "3 jobs would be retried in sqlite:///" in project.good(*where, "--dry-run")
    project.good(*where, "--newer-than", "1h", "--yes")
    output = " ".join(project.good(*where, "--dry-run").split())
    assert "0 of 3 jobs would be retried in sqlite:///" in output
    assert ", 3 were already retried" in output
    assert project.read(*where, "--dry-run")["already_retried"] == 3
    assert "0 of 3 jobs retried, 3 were already retried" in project.good(*where)  # nothing to confirm

    fill(project, 4)
    project.good("cancel", "job-3")
    refused = project.run(*where, "--task", "any.task", stdin="n\n")
    assert "Retry 1 of 4 jobs (task any.task; 3 were already retried) in sqlite:///" in refused.stderr


@pytest.mark.parametrize("selection", [["--state", "cancelled", "--yes"], ["job-0"]])
def test_a_job_names_its_retry(project: Project, selection: list[str]) -> None:
    fill(project, 1)
    project.good("cancel", "job-0")
    assert project.read("job", "job-0")["retried_as"] is None
    project.good("retry", *selection)
    assert f"retried as {retry_id('job-0')}" in " ".join(project.good("job", "job-0").split())
    assert project.read("job", "job-0")["retried_as"] == retry_id("job-0")


def test_a_question_names_the_number_and_the_selection(project: Project) -> None:
    fill(project, 3, queue="images")
    refused = project.run("cancel", "--queue", "images", "--newer-than", "2h", stdin="n\n")
    assert refused.exit_code == 1
    assert "Cancel 3 jobs (queue images, newer than 2 h) in sqlite:///" in refused.stderr.replace("120 min", "2 h")
    assert len(project.read("jobs", "--state", "pending")["jobs"]) == 3
    assert "--yes" in project.refused("cancel", "--queue", "images")
    assert project.run("cancel", "--queue", "images", stdin="y\n").exit_code == 0
    assert project.read("jobs", "--state", "pending")["jobs"] == []


def test_nothing_to_change_is_not_asked_about_and_names_the_store(project: Project) -> None:
    assert "no such jobs in sqlite:///" in project.good("purge", "--all")


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (("cancel",), "--all"),
        (("purge",), "--all"),
        (("cancel", "job", "--all"), "--all"),
        (("cancel", "job", "--dry-run"), "--dry-run"),
        (("retry", "--failed", "--state", "completed"), "--failed"),
        (("retry", "--all", "--queue", "a"), "--queue"),
        (("retry", "--state", "pending", "--yes"), "state"),
        (("purge", "--state", "pending", "--yes"), "--cancel-waiting"),
        (("purge", "--state", "running", "--yes"), "state"),
        (("cancel", "--lane", "a", "--yes"), "queue"),
        (("cancel", "--older-than", "soon"), "soon"),
    ],
)
def test_a_selection_that_is_invalid_is_rejected(project: Project, args: tuple[str, ...], word: str) -> None:
    assert word in project.refused(*args)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("1.5h", 5_400), ("30m", 1_800), ("7d", 604_800), ("2 h", 7_200)]
)
def test_ages_are_read_as_people_write_them(text: str, seconds: float) -> None:
    assert Age().convert(text, None, None) == seconds


def test_an_error_in_the_middle_reports_what_was_done(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(project, 120)
    original, calls = SqliteStore.cancel, []

    async def breaks(self: SqliteStore, ids: Sequence[str]) -> list[JobState]:
        calls.append(ids)
        if len(calls) == 2:
            raise StoreUnavailable("the server is gone")
        return await original(self, ids)

    monkeypatch.setattr(SqliteStore, "cancel", breaks)
    output = project.refused("cancel", "--all", "--yes", code=1)
    assert "failed after 50 jobs, 50 of them cancelled; repeat the command" in output


def test_an_interrupted_command_goes_on_when_it_is_repeated(project: Project) -> None:
    fill(project, 6_000)
    process = project.start("cancel", "--all", "--yes")
    until = time.monotonic() + 30
    while len(project.read("jobs", "--state", "cancelled", "--limit", "1")["jobs"]) == 0:
        assert time.monotonic() < until
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert process.returncode in (0, 130), error
    output = project.read("cancel", "--all", "--yes")
    if process.returncode == 130:
        assert "repeat the command" in error
        assert output["cancelled"] < 6_000
    assert project.read("cancel", "--all", "--yes")["matched"] == 0


# -- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("every_store")
def test_limits_are_shown_overridden_and_cleared(project: Project) -> None:
    project.write(
        "art.py", 'from fairlane import Fairlane\napp = Fairlane()\napp.queue("art", limit=8).lane("u:*", limit=2)\n'
    )
    project.good("pause", "art", "-A", "art")
    project.good("resume", "art")
    whole = {"lane": None, "declared": 8, "overridden": False, "limit": 8, "paused": False}
    lanes = {"lane": "u:*", "declared": 2, "overridden": False, "limit": 2, "paused": False}
    assert project.read("limit", "art")["limits"] == [whole, lanes]
    assert project.read("limit", "art", "3")["limits"][0] == whole | {"overridden": True, "limit": 3}
    assert project.read("limit", "art", "1", "--lane", "u:*")["limits"] == [lanes | {"overridden": True, "limit": 1}]
    ann = lanes | {"lane": "u:ann", "overridden": True, "limit": None}
    assert project.read("limit", "art", "none", "--lane", "u:ann")["limits"] == [ann]
    shown = project.good("limit", "art")
    assert "u:ann" in shown
    assert "none" in shown
    project.good("limit", "art", "--clear", "--lane", "u:ann")
    project.good("limit", "art", "--clear", "--lane", "u:*")
    assert project.read("limit", "art", "--clear")["limits"] == [whole, lanes]


def test_a_limit_that_is_invalid_is_rejected(project: Project) -> None:
    project.good("enqueue", "any.task")
    assert "pause" in project.refused("limit", "default", "0")
    assert "many" in project.refused("limit", "default", "many")
    assert "--clear" in project.refused("limit", "default", "3", "--clear")
    assert "nobody" in project.refused("limit", "nobody", code=1)
    assert "nobody" in project.refused("limit", "nobody", "3", code=1)


# -- schedules and tasks ---------------------------------------------------------------------------------------------

TIDY = """
from fairlane import Fairlane
app = Fairlane()

@app.task(queue="chores", cron="0 3 * * *", timezone="Europe/Berlin", timeout=60)
async def tidy(days: int = 7) -> None: ...

@app.task(lane="user:{user}", retries=0, every=3600, name="chores.mail")
async def mail(user: str = "ann") -> str: return user
"""


@pytest.mark.usefixtures("every_store")
def test_schedules_show_their_next_run_and_whether_a_worker_declares_them(project: Project) -> None:
    project.write("chores.py", TIDY)
    assert project.read("schedules")["schedules"] == []
    assert "no schedules in " in project.good("schedules")
    project.good("worker", "-A", "chores", "--burst", "--log-level", "error")
    mail, tidy = project.read("schedules")["schedules"]
    assert (mail["name"], mail["timetable"]) == ("chores.mail", {"every": 3600.0})
    assert tidy["timetable"] == {"cron": "0 3 * * *", "timezone": "Europe/Berlin"}
    assert 0 < mail["next"] - time.time() <= 3_600
    assert (mail["last"], mail["live"], mail["stopped"]) == (None, False, False)
    shown = project.good("schedules")
    assert "every 60 min" in shown
    assert "no live worker declares it" in shown


def test_a_schedule_that_no_worker_declares_is_shown_as_stopped(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write("chores.py", TIDY)
    project.good("worker", "-A", "chores", "--burst", "--log-level", "error")
    now = time.time()
    monkeypatch.setattr("fairlane.cli.tasks.time.time", lambda: now + FORGOTTEN_SECONDS + 60)
    assert [each["next"] for each in project.read("schedules")["schedules"]] == [None, None]
    assert "stopped" in project.good("schedules")


def test_tasks_are_listed_with_what_they_take(project: Project) -> None:
    project.write("chores.py", TIDY)
    mail, tidy = project.read("tasks", "-A", "chores")["tasks"]
    assert (mail["name"], mail["lane"], mail["retries"]) == ("chores.mail", "user:{user}", 0)
    assert (tidy["queue"], tidy["timeout"], tidy["signature"]) == ("chores", 60.0, "(days: int = 7) -> None")
    shown = project.good("tasks", "-A", "chores")
    for word in ("user:{user}", "0 3 * * * Europe/Berlin", "(days: int = 7) -> None"):
        assert word in shown
    assert "--app" in project.refused("tasks")


# -- commands that only read -----------------------------------------------------------------------------------------

LOOKING = [
    ("status",),
    ("status", "job"),
    ("job", "job"),
    ("jobs",),
    ("queues",),
    ("lanes", "default"),
    ("workers",),
    ("bindings",),
    ("schedules",),
    ("tokens",),
    ("tokens", "revoke", "x"),
    ("top",),
    ("limit", "default"),
    ("doctor",),
    ("retry", "--failed", "--yes"),
    ("cancel", "job"),
    ("purge", "--all", "--yes"),
    ("pause", "default"),
    ("release", "key"),
]


@pytest.mark.parametrize("args", LOOKING, ids=" ".join)
def test_a_command_that_needs_a_store_makes_none(
    tmp_path: Path, project: Project, args: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    result = project.run(*args)
    assert result.exit_code == 1
    assert "there is no store in" in result.output
    assert "fairlane migrate" in result.output
    assert list(empty.iterdir()) == []


def test_a_command_that_looks_leaves_no_new_file_and_changes_no_settings(project: Project) -> None:
    project.good("enqueue", "any.task")
    before = {path.name for path in Path.cwd().iterdir()}
    for args in (("status",), ("jobs",), ("queues", "-A", "shop"), ("schedules", "-A", "shop"), ("top",)):
        project.good(*args)
    assert {path.name for path in Path.cwd().iterdir()} - {"__pycache__"} == before
    assert [queue["name"] for queue in project.read("queues")["queues"]] == ["default"]


def test_a_file_that_is_no_store_is_left_as_it_is(project: Project) -> None:
    import sqlite3

    other = sqlite3.connect("other.db")
    other.execute("CREATE TABLE mine (a)")
    other.close()
    before = Path("other.db").read_bytes()
    assert "there is no store" in project.refused("jobs", "--url", "sqlite:///other.db", code=1)
    assert Path("other.db").read_bytes() == before
    assert not list(Path.cwd().glob("other.db-*"))


@pytest.mark.usefixtures("every_store")
def test_an_empty_answer_names_its_store_without_the_password(project: Project) -> None:
    for args in (("jobs",), ("queues",), ("workers",), ("bindings",), ("schedules",)):
        output = project.good(*args)
        assert f"no {args[0]} in " in output
        assert "password" not in output
        assert project.read(*args)["store"] in output
