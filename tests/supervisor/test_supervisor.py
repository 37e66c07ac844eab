"""A supervisor and real processes: some die, hang, are suspended, are busy, or ignore the stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fairlane import open_store
from fairlane.errors import StoreUnavailable
from fairlane.model.job import JobState
from fairlane.model.session import SessionState
from fairlane.store.port import Store
from fairlane.supervisor.supervisor import is_halted, restart_delay

from .fleet import QUICK, Fleet, until

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).resolve().parents[2]


# -- death -----------------------------------------------------------------------------------------------------------


async def test_a_killed_process_is_charged_for_what_had_begun_and_for_nothing_else(fleet: Fleet) -> None:
    ids = await fleet.enqueue(*["begin", "hold"] * 4)
    async with fleet.supervisor(processes=2, slots=4) as supervised:
        before = {job.id: job for job in await fleet.until_running(ids)}
        victim = before[ids[0]].session
        assert victim is not None
        child = await supervised.child_of(victim)
        child.process.signal(signal.SIGKILL)
        after = {job.id: job for job in await fleet.until_running(ids, not_by=victim)}
    lost = [job for job in before.values() if job.session == victim]
    assert sorted(job.task for job in lost) == ["begin", "begin", "hold", "hold"]
    for job in lost:
        [first, *_] = after[job.id].attempts
        charged = (first.outcome, after[job.id].attempt)
        assert charged == (("crashed", 2) if job.task == "begin" else ("taken_back", 1))
    for job in before.values():
        if job.session != victim:
            assert (after[job.id].fence, after[job.id].session) == (job.fence, job.session)


async def test_a_killed_process_hands_its_jobs_to_another_at_once(fleet: Fleet) -> None:
    async with fleet.supervisor(processes=2, slots=4) as supervised:
        await supervised.until_registered(2)
        [id] = await fleet.enqueue("begin")
        [job] = await fleet.until_running([id])
        assert job.session is not None
        child = await supervised.child_of(job.session)
        began = time.monotonic()
        child.process.signal(signal.SIGKILL)
        await fleet.until_running([id], not_by=job.session)
        # Far less than the lease, and than the time a new process needs to start.
        assert time.monotonic() - began < QUICK.lease / 2
        await supervised.until_registered(2)


async def test_a_process_that_dies_without_a_session_is_simply_replaced(fleet: Fleet) -> None:
    started = fleet.folder / "started"
    program = f"import os, time; open({str(started)!r} + str(os.getpid()), 'w'); time.sleep(60)"
    async with fleet.supervisor(command=[sys.executable, "-c", program]) as supervised:
        await fleet.until_file("started*")
        supervised.supervisor.children[0].process.signal(signal.SIGKILL)
        await fleet.until_file("started*", 2)


async def test_a_death_is_logged_with_its_pid_and_in_words(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    async with fleet.supervisor() as supervised:
        await supervised.until_registered()
        process = supervised.supervisor.children[0].process
        process.signal(signal.SIGSEGV)
        await process.wait()
        await supervised.until_registered()
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert errors[0] == f"process {process.pid}, number 0, was ended by SIGSEGV"


async def test_a_death_names_the_jobs_that_had_begun(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    ids = await fleet.enqueue(*["begin"] * 12, "hold")
    async with fleet.supervisor(slots=13) as supervised:
        await fleet.until_running(ids)
        process = supervised.supervisor.children[0].process
        process.signal(signal.SIGSEGV)
        await supervised.until_registered()
        await process.wait()
        await until(lambda: _logged(caplog, f"process {process.pid}"))
    [words] = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR][:1]
    start = f"process {process.pid}, number 0, was ended by SIGSEGV while it ran 12 jobs: "
    assert words.startswith(start)
    assert words.endswith(" and 2 more")
    named = words.removeprefix(start).removesuffix(" and 2 more").split(", ")
    assert len(named) == len(set(named)) == 10
    assert set(named) < set(ids[:12])


async def _logged(caplog: pytest.LogCaptureFixture, words: str) -> bool:
    return any(words in r.getMessage() for r in caplog.records if r.levelno == logging.ERROR)


async def test_the_session_of_a_dead_process_is_left_when_the_store_comes_back(fleet: Fleet) -> None:
    down = asyncio.Event()
    tries = 0

    async def open_sometimes() -> Store:
        nonlocal tries
        tries += 1
        if not down.is_set():
            raise StoreUnavailable("not now")
        return await open_store(fleet.url)

    [id] = await fleet.enqueue("begin")
    async with fleet.supervisor(store=open_sometimes) as supervised:
        [job] = await fleet.until_running([id])
        assert job.session is not None
        (await supervised.child_of(job.session)).process.signal(signal.SIGKILL)
        seen = tries

        async def tried_twice() -> bool:
            return tries >= seen + 2

        await until(tried_twice)
        [unchanged] = await fleet.jobs([id])
        assert (unchanged.state, unchanged.session) == (JobState.RUNNING, job.session)
        down.set()
        [again] = await fleet.until_running([id], not_by=job.session)
        assert again.attempt == 2


async def test_a_job_that_kills_its_process_every_time_fails_in_the_end(fleet: Fleet) -> None:
    [poison] = await fleet.enqueue("die")
    async with fleet.supervisor():

        async def failed() -> bool:
            await fleet.store.promote()
            [job] = await fleet.jobs([poison])
            return job.state is JobState.FAILED

        await until(failed)
    [job] = await fleet.jobs([poison])
    assert (job.reason, job.attempt) == ("crashed", 4)


# -- restarts --------------------------------------------------------------------------------------------------------


def test_the_first_restart_comes_at_once_and_the_later_ones_back_off() -> None:
    assert [restart_delay(deaths) for deaths in range(9)] == [0, 0.5, 1, 2, 4, 8, 16, 30, 30]
    assert restart_delay(100_000) == 30


async def test_a_process_that_cannot_start_is_not_started_in_a_tight_loop(fleet: Fleet) -> None:
    program = f"import os; open({str(fleet.folder)!r} + f'/started-{{os.getpid()}}', 'w'); raise SystemExit(3)"
    async with fleet.supervisor(command=[sys.executable, "-c", program]) as supervised:
        began = time.monotonic()
        await fleet.until_file("started-*", 4)
        # Started at 0, at once, and after pauses of 0.5 and 1 s.
        assert time.monotonic() - began >= 1.4
        assert not supervised.run.done()


async def test_a_command_that_does_not_exist_is_logged_and_tried_again(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    async with fleet.supervisor(command=["/no/such/program"]):

        async def told_twice() -> bool:
            return sum("cannot be started" in r.getMessage() for r in caplog.records) >= 2

        await until(told_twice)


async def test_processes_that_are_done_are_not_replaced(fleet: Fleet) -> None:
    program = f"import os; open({str(fleet.folder)!r} + f'/started-{{os.getpid()}}', 'w')"
    async with fleet.supervisor(command=[sys.executable, "-c", program], processes=2, until_done=True) as supervised:
        await asyncio.wait_for(supervised.run, 30)
    assert len(list(fleet.folder.glob("started-*"))) == 2


async def test_each_process_has_a_number_that_its_successor_takes_over(fleet: Fleet) -> None:
    program = f"""if True:
        import os, time
        open({str(fleet.folder)!r} + f"/{{os.environ['FAIRLANE_PROCESS_NUMBER']}}-{{os.getpid()}}", "w")
        time.sleep(60)
    """
    async with fleet.supervisor(command=[sys.executable, "-c", program], processes=2) as supervised:
        await fleet.until_file("0-*")
        [second] = await fleet.until_file("1-*")
        [child] = [c for c in supervised.supervisor.children if second.name == f"1-{c.process.pid}"]
        child.process.signal(signal.SIGKILL)
        await fleet.until_file("1-*", 2)


# -- leases ----------------------------------------------------------------------------------------------------------


async def test_the_lease_of_a_stopped_process_is_left_to_end(fleet: Fleet) -> None:
    async with fleet.supervisor() as supervised:
        [session] = await supervised.until_registered()
        child = await supervised.child_of(session)
        child.process.signal(signal.SIGSTOP)

        async def ended() -> bool:
            return await fleet.remaining(session) < 0

        await until(ended)
        assert is_halted(child.process.pid)


async def test_the_lease_of_a_busy_process_is_renewed_and_its_jobs_stay_with_it(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    ids = await fleet.enqueue("begin", "hold", "busy")
    async with fleet.supervisor() as supervised:
        [session] = await supervised.until_registered()
        child = await supervised.child_of(session)

        async def quiet() -> bool:
            return child.renewed_at > 0

        await until(quiet)
        least = QUICK.lease
        while not (fleet.folder / f"awake-{ids[2]}").exists():
            least = min(least, await fleet.remaining(session))
            await asyncio.sleep(0.05)
        assert least > 0
        # The supervisor cannot know why: after an outage of the store no process is busy.
        assert "it is busy, or the store did not answer it" in caplog.text
        # It renews its lease itself again.
        beat = child.crash_state.read().last_beat
        assert beat is not None

        async def beats() -> bool:
            return (child.crash_state.read().last_beat or 0) > beat

        await until(beats)
        jobs = await fleet.jobs(ids)
    assert [(job.session, job.fence) for job in jobs] == [(session, 1)] * 3


@pytest.mark.parametrize("orderly", [True, False])
async def test_a_session_that_cannot_be_renewed_is_a_warning_unless_its_process_ended_it(
    fleet: Fleet, caplog: pytest.LogCaptureFixture, orderly: bool
) -> None:
    program = "import time; time.sleep(600)"
    async with fleet.supervisor(command=[sys.executable, "-c", program]) as supervised:

        async def started() -> bool:
            return len(supervised.supervisor.children) == 1

        await until(started)
        [child] = supervised.supervisor.children
        child.crash_state.session("ended")
        child.crash_state.beat()
        if orderly:
            # The supervisor saw an old beat, and the process ended its session before the supervisor's call.
            child.crash_state.leave()
        await supervised.supervisor._renew(child, "ended")
    assert ("did not renew its lease in time" in caplog.text) is not orderly


# -- stopping --------------------------------------------------------------------------------------------------------


async def test_a_signal_is_passed_on_and_every_session_ends(fleet: Fleet) -> None:
    ids = await fleet.enqueue("begin", "hold")
    async with fleet.supervisor(processes=2) as supervised:
        sessions = await supervised.until_registered(2)
        await fleet.until_running(ids)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(supervised.run, 30)
    states = {session.id: session.state for session in await fleet.store.sessions()}
    assert [states[session] for session in sessions] == [SessionState.ENDED] * 2
    assert [(job.state, job.attempts[0].outcome) for job in await fleet.jobs(ids)] == [
        (JobState.PENDING, "taken_back")
    ] * 2


async def test_a_second_signal_is_passed_on_too(fleet: Fleet) -> None:
    (fleet.folder / "be-slow").touch()
    async with fleet.supervisor(grace=60) as supervised:
        await supervised.until_registered()
        supervised.supervisor.stop()
        await fleet.until_file("asked-1-*")
        assert not supervised.run.done()
        supervised.supervisor.stop()
        await asyncio.wait_for(supervised.run, 30)
    assert list(fleet.folder.glob("asked-2-*"))


async def test_a_process_that_outlives_its_grace_is_killed_and_its_jobs_are_not_charged(fleet: Fleet) -> None:
    ids = await fleet.enqueue("stubborn", "begin")
    async with fleet.supervisor(grace=0.1) as supervised:
        await fleet.until_running(ids)
        child = supervised.supervisor.children[0]
        supervised.supervisor.stop()
        await asyncio.wait_for(supervised.run, 30)
        assert child.process.code == -signal.SIGKILL
    assert [(job.state, job.attempts[0].outcome) for job in await fleet.jobs(ids)] == [
        (JobState.PENDING, "handed_back")
    ] * 2


async def test_a_stop_ends_a_pause_before_a_restart(fleet: Fleet) -> None:
    program = f"open({str(fleet.folder)!r} + '/started', 'a').write('.'); raise SystemExit(3)"
    async with fleet.supervisor(command=[sys.executable, "-c", program]) as supervised:

        async def twice() -> bool:
            path = fleet.folder / "started"
            return path.exists() and len(path.read_text()) >= 3

        await until(twice)
        supervised.supervisor.stop()
        await asyncio.wait_for(supervised.run, 30)


SUPERVISOR = """
import asyncio, sys
from fairlane import open_store
from fairlane.supervisor.supervisor import Supervisor
from tests.supervisor.fleet import QUICK

url, *command = sys.argv[1:]

async def main():
    await Supervisor(command, processes=2, open_store=lambda: open_store(url), intervals=QUICK, grace=5).run()

asyncio.run(main())
"""


async def test_processes_whose_supervisor_is_killed_stop_in_good_order(fleet: Fleet) -> None:
    ids = await fleet.enqueue(*["begin"] * 8)
    command = [sys.executable, "-c", SUPERVISOR, fleet.url, *fleet.command()]
    supervisor = subprocess.Popen(command, cwd=ROOT)  # noqa: ASYNC220 - one start, and it is waited for
    jobs = await fleet.until_running(ids)
    supervisor.kill()
    supervisor.wait()
    alone = await fleet.until_file("alone-*", 2)

    async def gone() -> bool:
        return all(is_halted(int(path.name.removeprefix("alone-"))) for path in alone)

    await until(gone)
    states = {session.id: session.state for session in await fleet.store.sessions()}
    assert {states[job.session or ""] for job in jobs} == {SessionState.ENDED}
