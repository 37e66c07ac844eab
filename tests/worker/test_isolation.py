"""Bodies in child processes: their environment, their endings, and how their deaths are reported."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fairlane.errors import FairlaneError
from fairlane.model.job import Held, Reason
from fairlane.runtime import logs
from fairlane.task import Task
from fairlane.worker import body, wire
from fairlane.worker.isolation import Crashed, Isolation, importable

from . import isolated_tasks
from .apart import Runner, gone, until

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
async def runner() -> AsyncIterator[Runner]:
    isolation = Isolation(most=2)
    yield Runner(isolation)
    await isolation.close()


# -- what a body gets and gives --------------------------------------------------------------------------------------


async def test_plain_and_coroutine_functions_run_in_another_process(runner: Runner) -> None:
    assert await runner.result(isolated_tasks.add, 2, 3) == 5
    assert await runner.result(isolated_tasks.add_later, 2, 3) == 5
    assert await runner.result(isolated_tasks.pid) != os.getpid()


async def test_a_warm_child_is_used_again_and_its_event_loop_stays_the_same(runner: Runner) -> None:
    assert await runner.result(isolated_tasks.pid) == await runner.result(isolated_tasks.pid)
    assert await runner.result(isolated_tasks.loop_id) == await runner.result(isolated_tasks.loop_id)


async def test_a_child_sees_the_modules_and_the_folder_of_its_worker(runner: Runner) -> None:
    seen = await runner.result(isolated_tasks.surroundings)
    assert seen == {
        "cwd": str(Path.cwd()),
        "path": sys.path,
        "pythonpath": os.environ.get("PYTHONPATH"),
        "stdin": "",
        "group": True,
    }


async def test_a_body_knows_its_job(runner: Runner) -> None:
    about = await runner.result(isolated_tasks.about_the_job, lane="ann", timeout=100.0)
    assert about == ["job-1", 3, 2, "ann", True]


async def test_the_last_progress_arrives_before_the_ending(runner: Runner) -> None:
    await runner.result(isolated_tasks.report, 1000)
    assert runner.reports[-1] == (Held("job-1", 3), b'{"step":1000}')


async def test_progress_arrives_while_the_body_runs(runner: Runner, tmp_path: Path) -> None:
    path = tmp_path / "go on"
    run = asyncio.create_task(runner.ending(isolated_tasks.report_and_wait, str(path)))
    await until(lambda: bool(runner.reports))
    assert not run.done()
    path.touch()
    assert await run == body.Returned(b"null")


@pytest.mark.parametrize(
    ("task", "args", "expected"),
    [
        (isolated_tasks.registered_by_a_call, [1], 2),
        (isolated_tasks.in_a_class, [], "in a class"),
        (isolated_tasks.layered.__wrapped__, [], "layered"),
    ],
)
async def test_a_function_is_found_however_it_was_registered(
    runner: Runner, task: Task[..., Any], args: list[Any], expected: Any
) -> None:
    assert importable(task)
    assert await runner.result(task, *args) == expected


async def test_what_a_child_could_not_find_is_not_importable_and_refused(runner: Runner) -> None:
    for task in (isolated_tasks.local_task(), isolated_tasks.hidden):
        assert not importable(task)
        with pytest.raises(FairlaneError, match="cannot run in a child process"):
            await runner.ending(task)


# -- endings ---------------------------------------------------------------------------------------------------------


async def test_an_exception_is_an_error_with_the_traceback_of_the_body(runner: Runner) -> None:
    ending = await runner.ending(isolated_tasks.fail, "no such cat")
    assert isinstance(ending, body.Raised)
    assert (ending.reason, ending.group, ending.final) == (Reason.ERROR, "ValueError in fail", False)
    assert "no such cat" in ending.error
    assert "worker/child.py" not in ending.error


async def test_a_body_decides_how_it_ends_as_it_would_in_the_worker(runner: Runner) -> None:
    assert await runner.ending(isolated_tasks.snooze) == body.Snoozed(5)


async def test_arguments_that_do_not_fit_never_reach_the_body(runner: Runner) -> None:
    ending = await runner.ending(isolated_tasks.add, "two", 3)
    assert isinstance(ending, body.Raised)
    assert (ending.reason, ending.final) == (Reason.BAD_PAYLOAD, True)
    assert "argument 'a'" in ending.error


async def test_leaving_the_interpreter_is_an_error_and_the_child_goes_on(runner: Runner) -> None:
    pid = await runner.result(isolated_tasks.pid)
    ending = await runner.ending(isolated_tasks.leave, 0)
    assert isinstance(ending, body.Raised)
    assert ending.group == "SystemExit in leave"
    assert await runner.result(isolated_tasks.pid) == pid


async def test_a_body_that_breaks_its_event_loop_has_crashed_and_ends_with_its_child(runner: Runner) -> None:
    pid = await runner.result(isolated_tasks.pid)
    for how in ("stop", "exit"):
        ending = await runner.ending(isolated_tasks.break_the_loop, how)
        assert isinstance(ending, Crashed)
        assert ending.begun
        was, pid = pid, await runner.result(isolated_tasks.pid)
        assert pid != was


async def test_a_child_logs_as_its_worker_does(runner: Runner, capfd: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    logs.configure("debug", "json")
    try:
        await runner.result(isolated_tasks.log_debug, "thin ice")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    [line] = [line for line in capfd.readouterr().err.splitlines() if "thin ice" in line]
    record = json.loads(line)
    assert (record["level"], record["logger"], record["job"], record["attempt"]) == (
        "debug",
        "isolated_tasks",
        "job-1",
        2,
    )


async def test_an_error_whose_text_is_not_text_arrives(runner: Runner) -> None:
    ending = await runner.ending(isolated_tasks.odd_text)
    assert isinstance(ending, body.Raised)
    assert "? is not text" in ending.error


@pytest.mark.parametrize(
    ("task", "args", "words"),
    [
        (isolated_tasks.crash, [], "the child process was ended by SIGSEGV"),
        (isolated_tasks.be_killed, [], "the child process was ended by SIGKILL"),
        (isolated_tasks.vanish, [3], "the child process exited with code 3"),
    ],
)
async def test_a_death_is_described_in_words_and_the_next_job_runs(
    runner: Runner, task: Task[..., Any], args: list[Any], words: str
) -> None:
    assert await runner.ending(task, *args) == Crashed(words)
    assert await runner.result(isolated_tasks.add, 1, 1) == 2


async def test_a_death_is_seen_although_a_process_left_behind_holds_the_socket(runner: Runner, tmp_path: Path) -> None:
    path = tmp_path / "left"
    ending = await asyncio.wait_for(runner.ending(isolated_tasks.vanish_with_a_child_left, str(path)), 30)
    assert ending == Crashed("the child process exited with code 7")
    await gone(int(path.read_text()))


@pytest.mark.parametrize("reuse", [False, True])
async def test_a_body_that_closes_its_descriptors_has_crashed(runner: Runner, reuse: bool) -> None:
    ending = await asyncio.wait_for(runner.ending(isolated_tasks.close_descriptors, reuse), 30)
    assert ending == Crashed("the child process was ended by SIGKILL")
    assert await runner.result(isolated_tasks.add, 1, 1) == 2


@pytest.mark.parametrize(
    "junk",
    [b"\xff\xff\xff\xff" + b"A" * 1000, b"\0\0\0\x05hello", b"\0\0\0\x02{}", b"\0\x01\0\0", b"A"],
    ids=["too long", "no JSON", "no message", "not all of it", "a letter"],
)
async def test_a_body_that_writes_to_the_socket_has_crashed(
    runner: Runner, junk: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "QUIET_SECONDS", 0.2)
    ending = await asyncio.wait_for(runner.ending(isolated_tasks.write_to_sockets, list(junk)), 30)
    assert isinstance(ending, Crashed)
    assert "has written to its socket" in ending.error
    assert await runner.result(isolated_tasks.add, 1, 1) == 2


async def test_an_ending_that_a_body_made_up_is_not_that_of_the_next_job(runner: Runner) -> None:
    ended = wire.frame(wire.Ended(Held("job-1", 3), body.Returned(b'"made up"')))
    assert await runner.ending(isolated_tasks.write_to_sockets, list(ended)) == body.Returned(b'"made up"')
    # Its own ending came after that, and is read with the next job.
    assert await runner.result(isolated_tasks.add, 1, 1, id="next") == 2


async def test_an_error_of_any_length_arrives(runner: Runner) -> None:
    ending = await runner.ending(isolated_tasks.fail, "x" * 200_000)
    assert isinstance(ending, body.Raised)
    ending = await runner.ending(isolated_tasks.fail_at_length, 20_000_000)
    assert isinstance(ending, body.Raised)
    assert ending.error.rstrip().endswith("the end")


# -- modules ---------------------------------------------------------------------------------------------------------


async def test_a_module_that_cannot_be_imported_is_an_error_and_not_a_hang(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "soon_broken.py"
    file.write_text("from tests.worker.isolated_tasks import task\n\n@task\ndef work() -> None: ...\n")
    import soon_broken  # type: ignore[import-not-found]  # written by the test

    file.write_text("import no_such_module_anywhere\n")
    ending = await runner.ending(soon_broken.work)
    assert isinstance(ending, body.Raised)
    assert "No module named 'no_such_module_anywhere'" in ending.error
    assert ending.reason is Reason.ERROR


SCRIPT = """
import asyncio, sys
from tests.worker.isolated_tasks import task
from tests.worker.apart import claimed
from fairlane.worker.isolation import Isolation, importable

@task
def work(a: int) -> str:
    return f"{__name__} {a}"

async def main():
    assert importable(work)
    isolation = Isolation(most=1)
    for n in range(2):
        ending = await isolation.run(work, claimed(n), report=lambda *_: None)
        print(getattr(ending, "result", ending))
    await isolation.close()

if __name__ == "__main__":
    asyncio.run(main())
else:
    print("imported as", __name__, flush=True)
"""


@pytest.mark.parametrize("name", ["script.py", "odd-name.2.py", "json.py"])
def test_a_task_of_a_script_runs_without_running_the_script_again(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "scripts"
    folder.mkdir()
    file = folder / name
    file.write_text(SCRIPT)
    # The safe path keeps json.py from replacing the json module, and the script from being found by its name.
    environ = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, env=environ, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    stem = "script" if name == "script.py" else "__fairlane_script__"
    assert done.stdout.split("\n") == [f"imported as {stem}", f"b'\"{stem} 0\"'", f"b'\"{stem} 1\"'", ""]


def test_a_task_of_a_package_that_is_run_is_found_in_its_main_module(tmp_path: Path) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(SCRIPT)
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pack"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environ, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "imported as pack.__main__"
