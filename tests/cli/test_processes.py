"""Commands that keep running: workers and managers as real processes."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from fairlane import Fairlane
from fairlane.cli.context import CommandContext
from fairlane.cli.worker import read_settings
from fairlane.errors import InvalidInput
from fairlane.model.ids import new_id
from fairlane.model.session import NewSession, SessionKind
from fairlane.model.slots import Slots
from fairlane.worker.settings import WorkerSettings
from fairlane.worker.worker_index import choose_index
from tests.cli.project import Project, eventually
from tests.servers import postgresql

QUIET = ("--log-level", "warning")


def _worker(project: Project, *args: str, **environ: str) -> subprocess.Popen[str]:
    return project.start("worker", "-A", "shop", *args, **environ)


def _running(project: Project) -> Any:
    return project.read("jobs", "--state", "running")["jobs"]


@pytest.mark.usefixtures("every_store")
def test_a_worker_runs_jobs_and_ends_with_0_at_sigterm(project: Project) -> None:
    worker = _worker(project)
    id = project.read("enqueue", "-A", "shop", "render", "ann")["id"]
    eventually(lambda: project.read("job", id)["state"] == "completed")
    assert project.read("job", id)["result"] == "ann: a cat"
    output = project.stop(worker)
    assert "ready" in output
    assert "stopped" in output
    [session] = project.read("workers", "--all")["workers"]
    assert session["state"] == "ended"


def test_a_worker_serves_every_queue_its_application_names(project: Project) -> None:
    worker = _worker(project, *QUIET)
    [session] = eventually(lambda: project.read("workers")["workers"])
    assert set(session["queues"]) == {"default", "images", "models", "slow"}
    project.stop(worker, signal.SIGINT)


@pytest.mark.parametrize("processes", [(), ("--processes", "2")])
def test_queues_that_the_application_does_not_name_are_warned_of_once(
    project: Project, processes: tuple[str, ...]
) -> None:
    worker = _worker(project, "-Q", "imagse,images,mdoels=2,models", "--burst", *processes)
    _, log = worker.communicate(timeout=60)
    assert worker.returncode == 0, log
    [warning] = [line for line in log.splitlines() if "WARNING" in line]
    assert warning.endswith("the application has no task and no declaration for queue imagse, mdoels")


def test_a_stopping_worker_finishes_what_it_has(project: Project) -> None:
    worker = _worker(project, *QUIET)
    first = project.read("enqueue", "-A", "shop", "nap", "1.5")["id"]
    eventually(lambda: _running(project))
    worker.send_signal(signal.SIGTERM)
    second = project.read("enqueue", "-A", "shop", "nap", "0")["id"]
    worker.communicate(timeout=60)
    assert worker.returncode == 0
    assert project.read("job", first)["state"] == "completed"
    assert project.read("job", second)["state"] == "pending"


def test_a_second_signal_hands_the_job_back_uncharged(project: Project) -> None:
    worker = _worker(project, *QUIET)
    id = project.read("enqueue", "-A", "shop", "nap", "60")["id"]
    eventually(lambda: _running(project))
    worker.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert worker.poll() is None
    assert "handing back 1 job that still runs\n" in project.stop(worker)
    job = project.read("job", id)
    assert job["state"] == "pending"
    assert [attempt["outcome"] for attempt in job["attempts"]] == ["handed_back"]


def test_a_worker_that_waits_for_its_index_can_be_stopped(project: Project) -> None:
    asyncio.run(project.with_store(lambda store: store.register(_holder("elsewhere", 1))))
    worker = _worker(project, "--index", "3")
    assert worker.stderr is not None
    assert any("waiting" in line for line in worker.stderr)
    project.stop(worker)


def test_a_burst_ends_when_there_is_nothing_left(project: Project) -> None:
    ids = [project.read("enqueue", "-A", "shop", "render", f"user-{n}")["id"] for n in range(5)]
    worker = _worker(project, "--burst", "-c", "2")
    _, error = worker.communicate(timeout=60)
    assert worker.returncode == 0, error
    assert {project.read("job", id)["state"] for id in ids} == {"completed"}


def test_log_lines_are_json_if_asked(project: Project) -> None:
    worker = _worker(project, "--burst", "--log-format", "json")
    _, error = worker.communicate(timeout=60)
    records = [json.loads(line) for line in error.splitlines()]
    assert any("is ready" in record["message"] for record in records)


def test_metrics_are_served(project: Project, free_port: int) -> None:
    worker = _worker(project, "--metrics-port", str(free_port), *QUIET)
    project.good("enqueue", "-A", "shop", "render", "ann", "--wait")

    def scraped() -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{free_port}/metrics", timeout=10) as answer:
                text: str = answer.read().decode()
        except OSError:
            return ""
        return text if "fairlane_jobs_finished_total" in text else ""

    text = eventually(scraped)
    assert 'fairlane_queue_workers{queue="images"} 1.0' in text
    project.stop(worker)


@pytest.mark.parametrize("loop", ["asyncio", "auto"])
def test_serving_on_a_busy_port_is_one_line_and_exit_code_1(
    project: Project, monkeypatch: pytest.MonkeyPatch, loop: str
) -> None:
    monkeypatch.setenv("FAIRLANE_LOOP", loop)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        process = project.start("serve", "-A", "shop", "--port", str(port))
        _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    [line] = error.splitlines()
    assert line.startswith(f"Error: cannot listen on 127.0.0.1, port {port}: Address already in use (choose another")


@pytest.mark.parametrize(
    "command", [["worker", "-A", "shop", "--log-level", "error"], ["serve", "-A", "shop", "--port", "0"], ["jobs"]]
)
def test_an_unknown_event_loop_is_one_line(
    project: Project, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setenv("FAIRLANE_LOOP", "foo")
    _, error = project.start(*command).communicate(timeout=60)
    assert error == "Error: FAIRLANE_LOOP: must be auto, asyncio or uvloop, not 'foo'\n"


def _asked(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode().strip()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode().strip()
    except OSError:
        return 0, ""


def test_a_worker_answers_health_probes(project: Project, free_port: int) -> None:
    worker = _worker(project, "--metrics-port", str(free_port), "--metrics-host", "0.0.0.0", *QUIET)
    assert eventually(lambda: _asked(free_port, "/readyz")[0] == 200)
    assert _asked(free_port, "/healthz") == (200, "ok")
    assert _asked(free_port, "/readyz") == (200, "ok")
    project.good("enqueue", "-A", "shop", "nap", "3")
    assert eventually(lambda: project.read("jobs", "--state", "running")["jobs"])
    worker.send_signal(signal.SIGTERM)
    assert eventually(lambda: _asked(free_port, "/readyz") == (503, "the worker is stopping"))
    assert _asked(free_port, "/healthz") == (200, "ok")
    _, error = worker.communicate(timeout=60)
    assert worker.returncode == 0, error


def test_a_port_that_is_taken_is_one_line(project: Project, free_port: int) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port))
        taken.listen()
        worker = _worker(project, "--metrics-port", str(free_port), *QUIET)
        _, error = worker.communicate(timeout=60)
    assert worker.returncode == 1
    assert f"--metrics-port {free_port}" in error
    assert "Traceback" not in error


@pytest.fixture
def free_port() -> int:
    """A free port."""
    return postgresql.free_port()


# -- several processes -----------------------------------------------------------------------------------------------


def test_a_killed_process_is_replaced_and_its_job_runs_again(project: Project) -> None:
    supervisor = _worker(project, "--processes", "2", *QUIET, FAIRLANE_LEASE="60", FAIRLANE_HEARTBEAT="1")
    eventually(lambda: len(project.read("workers")["workers"]) == 2)
    id = project.read("enqueue", "-A", "shop", "nap", "3")["id"]
    [job] = eventually(lambda: _running(project))
    pids = {worker["worker"]: worker["pid"] for worker in project.read("workers")["workers"]}
    os.kill(pids[job["worker"]], signal.SIGKILL)
    eventually(lambda: project.read("job", id)["state"] == "completed")
    outcomes = [attempt["outcome"] for attempt in project.read("job", id)["attempts"]]
    assert outcomes == ["crashed", "completed"]
    eventually(lambda: len(project.read("workers")["workers"]) == 2)
    project.stop(supervisor)
    assert project.read("workers")["workers"] == []


def test_processes_end_when_their_supervisor_is_killed(project: Project) -> None:
    supervisor = _worker(project, "--processes", "2", *QUIET)
    workers = eventually(lambda: [w for w in [project.read("workers")["workers"]] if len(w) == 2])[0]
    supervisor.kill()
    supervisor.communicate(timeout=60)
    eventually(lambda: not any(Path(f"/proc/{worker['pid']}").exists() for worker in workers))


def test_processes_count_up_from_a_named_index(project: Project) -> None:
    supervisor = _worker(project, "--processes", "3", "--index", "5", *QUIET)
    places = {"default/5", "default/6", "default/7"}
    eventually(lambda: {worker["worker"] for worker in project.read("workers")["workers"]} == places)
    project.stop(supervisor)


def test_a_burst_of_processes_ends_too(project: Project) -> None:
    ids = [project.read("enqueue", "-A", "shop", "render", f"user-{n}")["id"] for n in range(5)]
    worker = _worker(project, "--burst", "--processes", "2", *QUIET)
    _, error = worker.communicate(timeout=60)
    assert worker.returncode == 0, error
    assert {project.read("job", id)["state"] for id in ids} == {"completed"}


# -- the manager -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("every_store")
def test_a_manager_alone_promotes_for_workers_without_one(project: Project) -> None:
    worker = _worker(project, "--no-manager", *QUIET)
    eventually(lambda: project.read("workers")["workers"])
    assert project.read("status")["leader"] is None
    id = project.read("enqueue", "-A", "shop", "render", "ann", "--delay", "0.2")["id"]
    manager = project.start("manager")
    eventually(lambda: project.read("job", id)["state"] == "completed")
    [session] = [s for s in project.read("workers", "--all")["workers"] if s["kind"] == "manager"]
    assert project.read("status")["leader"]["session"] == session["id"]
    output = project.stop(manager)
    assert "the manager has stopped" in output
    # It resigned, so the next leader does not have to wait for the end of its term.
    assert project.read("status")["leader"] is None
    project.stop(worker)


@pytest.mark.usefixtures("every_store")
def test_a_manager_that_was_declared_dead_registers_anew(project: Project) -> None:
    manager = project.start("manager", *QUIET)

    def present() -> list[str]:
        sessions = project.read("workers", "--all")["workers"]
        return [s["id"] for s in sessions if s["kind"] == "manager" and s["state"] == "live"]

    [first] = eventually(present)

    async def leave() -> None:
        async with Fairlane(project.url) as app:
            await (await app.connection.store()).leave(first)

    asyncio.run(leave())
    [second] = eventually(present)
    assert second != first
    project.stop(manager)


# -- the index -------------------------------------------------------------------------------------------------------


async def _chosen(project: Project, host: str, wish: str = "auto", *holders: NewSession, number: int = 0) -> int | None:
    context = CommandContext("shop", None)
    async with context.client():
        store = await context.connection.store()
        for holder in holders:
            await store.register(holder)
        return await choose_index(context.app.client, context.url, WorkerSettings(host=host), wish, number)


def _holder(host: str, pid: int, index: int = 3) -> NewSession:
    return NewSession(
        id=new_id(), kind=SessionKind.WORKER, host=host, pid=pid, index=index, queues=("a",), slots=Slots(total=2)
    )


async def test_the_host_name_gives_the_index(project: Project) -> None:
    assert await _chosen(project, "worker-3") == 3
    assert await _chosen(project, "worker-0012") == 12
    assert await _chosen(project, "worker-3", number=2) == 5


@pytest.mark.parametrize("host", ["worker3", "build-20241", "3", "worker-", "worker-3a"])
async def test_other_numbers_in_a_host_name_mean_nothing(project: Project, host: str) -> None:
    assert await _chosen(project, host) is None


async def test_an_index_held_by_a_living_process_of_this_host_is_left_to_it(project: Project) -> None:
    assert await _chosen(project, "worker-3", "auto", _holder("worker-3", os.getppid())) is None


async def test_an_index_of_a_process_that_is_gone_is_taken_over(project: Project) -> None:
    gone = await asyncio.create_subprocess_exec("true")
    await gone.wait()
    assert await _chosen(project, "worker-3", "auto", _holder("worker-3", gone.pid)) == 3


@pytest.mark.usefixtures("every_store")
async def test_of_several_that_start_at_once_only_one_gets_the_index(project: Project) -> None:
    chosen = [await _chosen(project, "worker-3") for _ in range(3)]
    assert chosen == [3, None, None]


async def test_an_index_held_by_a_namesake_on_another_host_is_left_to_it(project: Project) -> None:
    assert await _chosen(project, "worker-3", "auto", _holder("mailer-3", 1)) is None


async def test_host_demands_the_index_of_the_host_name(project: Project) -> None:
    from fairlane import InvalidInput

    assert await _chosen(project, "worker-3", "host", _holder("mailer-3", 1)) == 3
    with pytest.raises(InvalidInput, match="'laptop'"):
        await _chosen(project, "laptop", "host")


def _settings(context: CommandContext, **options: Any) -> WorkerSettings:
    usual = {"queues": None, "slots": None, "reserved": None, "processes": 1, "pool": None, "index": None}
    return read_settings(context, **{**usual, "grace": None, "no_manager": False, "burst": False, **options})


def test_reservations_follow_the_slots_unless_they_were_chosen(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [_settings(CommandContext("shop", None), slots=n).slots.reserved.high for n in (1, 2, 3, 4)] == [0, 0, 0, 1]
    assert _settings(CommandContext("shop", None), slots=5).slots.reserved.high == 1
    assert _settings(CommandContext("shop", None), slots=5, reserved="high=2,normal=1").slots.reserved.normal == 1
    monkeypatch.setenv("FAIRLANE_HIGH_PRIORITY_RESERVED", "3")
    assert _settings(CommandContext(None, None), slots=5).slots.reserved.high == 3
    # Also where it is what the default would be for other slots.
    for kept, slots in ((1, 2), (0, 10)):
        monkeypatch.setenv("FAIRLANE_HIGH_PRIORITY_RESERVED", str(kept))
        assert _settings(CommandContext(None, None), slots=slots).slots.reserved.high == kept
        app = Fairlane()
        app.task(name="length")(len)
        assert app.worker(slots=slots)._settings.slots.reserved.high == kept
    monkeypatch.setenv("FAIRLANE_HIGH_PRIORITY_RESERVED", "2")
    with pytest.raises(
        InvalidInput, match="--slots: FAIRLANE_HIGH_PRIORITY_RESERVED: reserving 2 of 2 slots leaves none"
    ):
        _settings(CommandContext(None, None), slots=2)
    # The slots of the command line count, not the default of 10.
    monkeypatch.setenv("FAIRLANE_HIGH_PRIORITY_RESERVED", "12")
    assert _settings(CommandContext(None, None), slots=20).slots.reserved.high == 12
    assert _settings(CommandContext(None, None), reserved="high=2").slots.reserved.high == 2
    with pytest.raises(InvalidInput, match="FAIRLANE_HIGH_PRIORITY_RESERVED: reserving 12 of 10 slots leaves none"):
        _settings(CommandContext(None, None))


def test_the_first_line_of_a_worker_shows_the_slots_of_normal_jobs(project: Project) -> None:
    for slots, words in (
        ("5", "5 slots: 4 for ordinary work, 1 reserved for high"),
        ("2", "2 slots, all for ordinary"),
    ):
        worker = _worker(project, "-c", slots)
        eventually(lambda: project.read("workers")["workers"])
        assert words in project.stop(worker)


def test_weights_of_queues_are_read(project: Project) -> None:
    assert _settings(CommandContext("shop", None), queues="images=3,mail").queues == {"images": 3, "mail": 1}
