"""What a dead process has recorded can be read, whenever it died; so can the records of a live one."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fairlane.errors import InvalidInput
from fairlane.model.job import Held
from fairlane.supervisor import crash_state
from fairlane.supervisor.crash_state import CrashReading, CrashState
from fairlane.supervisor.parent_pipe import CRASH_STATE_FD, PARENT_PIPE_FD, ParentPipe, supervised
from fairlane.supervisor.process import in_words

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).resolve().parents[2]


def pair() -> tuple[CrashState, CrashState]:
    """The supervisor's view and the worker's."""
    ours = CrashState.make()
    return ours, CrashState(os.dup(ours.fd))


def test_a_new_crash_state_is_empty() -> None:
    ours, _ = pair()
    assert ours.read() == CrashReading(None, None, ())


def test_what_one_side_writes_the_other_reads() -> None:
    ours, theirs = pair()
    theirs.session("session-1")
    assert ours.read() == CrashReading("session-1", None, ())
    before = time.monotonic()
    theirs.beat()
    first = theirs.begin(Held("job-1", 2**53))
    theirs.begin(Held("ü" * 100, 1))
    reading = ours.read()
    assert reading.session == "session-1"
    assert reading.last_beat is not None
    assert before <= reading.last_beat <= time.monotonic()
    assert set(reading.begun) == {Held("job-1", 2**53), Held("ü" * 100, 1)}
    theirs.end(first)
    assert ours.read().begun == (Held("ü" * 100, 1),)


def test_a_new_session_has_not_beaten_yet() -> None:
    ours, theirs = pair()
    for id in ("session-1", "a" * 200, "session-3"):
        theirs.session(id)
        assert ours.read() == CrashReading(id, None, ())
        theirs.beat()
        assert ours.read().last_beat is not None


def test_a_session_that_is_to_end_needs_no_renewal() -> None:
    ours, theirs = pair()
    theirs.session("session-1")
    theirs.beat()
    theirs.leave()
    assert ours.read() == CrashReading("session-1", None, ())


def test_there_is_room_for_any_number_of_jobs_and_room_is_used_again() -> None:
    ours, theirs = pair()
    held = [Held(f"job-{n}", n) for n in range(1000)]
    slots = [theirs.begin(each) for each in held]
    assert len(set(slots)) == 1000
    assert set(ours.read().begun) == set(held)
    for slot in slots:
        theirs.end(slot)
    assert ours.read().begun == ()
    size = os.fstat(ours.fd).st_size
    for _ in range(10):
        for slot in [theirs.begin(each) for each in held]:
            theirs.end(slot)
    assert os.fstat(ours.fd).st_size == size


def test_threads_may_begin_and_end_jobs_at_once() -> None:
    ours, theirs = pair()

    def work(number: int) -> None:
        for n in range(200):
            slots = [theirs.begin(Held(f"{number}-{n}-{m}", m)) for m in range(20)]
            for slot in slots[1:]:
                theirs.end(slot)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(ours.read().begun) == {Held(f"{number}-{n}-0", 0) for number in range(4) for n in range(200)}


WRITER = """
import sys
from random import Random
from fairlane.model.job import Held
from fairlane.supervisor.crash_state import CrashState

state, draw = CrashState(int(sys.argv[1])), Random(int(sys.argv[2]))
slots = []
for n in range(10**9):
    length = draw.randint(1, 200)
    slots.append(state.begin(Held(chr(97 + length % 26) * length, length)))
    if len(slots) > 5:
        state.end(slots.pop(draw.randrange(6)))
    length = draw.randint(1, 200)
    state.session(chr(65 + length % 26) * length)
    state.beat()
"""


@pytest.mark.parametrize("seed", range(5))
def test_a_writer_is_read_whole_while_it_writes_and_after_it_was_killed(seed: int) -> None:
    state = CrashState.make()
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(state.fd), str(seed)], pass_fds=[state.fd], cwd=ROOT)
    try:
        until = time.monotonic() + 30
        while len(state.read().begun) < 5:
            assert time.monotonic() < until
        for _ in range(5000):
            check(state.read())
    finally:
        writer.kill()
        writer.wait()
    reading = state.read()
    check(reading)
    assert reading.session
    assert 4 <= len(reading.begun) <= 6
    assert state.read() == reading


def check(reading: CrashReading) -> None:
    """Each record contains its length in each of its parts, so that a mixture of two is detected."""
    for held in reading.begun:
        assert held.id == chr(97 + held.fence % 26) * held.fence
    if reading.session is not None:
        assert reading.session == chr(65 + len(reading.session) % 26) * len(reading.session)


def test_a_reader_that_stood_still_does_not_mix_two_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it reads one record, the writer replaces it, often enough that any small number would occur again."""
    writer = CrashState.make()
    reader = CrashState(os.dup(writer.fd))
    slot = writer.begin(Held("old", 1))
    fences = struct.Struct("@q")

    class StandsStill:
        size = fences.size
        pack_into = staticmethod(fences.pack_into)
        turns = 255

        @classmethod
        def unpack_from(cls, memory: Any, at: int) -> tuple[Any, ...]:
            read = fences.unpack_from(memory, at)
            if cls.turns:
                cls.turns, turns = 0, cls.turns
                for _ in range(turns):
                    writer.end(slot)
                    assert writer.begin(Held("new", 2)) == slot
            return read

    monkeypatch.setattr(crash_state, "_fence", StandsStill)
    assert reader.read().begun == (Held("new", 2),)
    assert not StandsStill.turns


# -- what a process is given -----------------------------------------------------------------------------------------


def test_a_process_without_a_supervisor_is_given_nothing() -> None:
    assert supervised({"HOME": "/"}) is None


def test_what_a_process_was_given_is_not_handed_on() -> None:
    state = CrashState.make()
    ends = os.pipe()
    environ = {CRASH_STATE_FD: str(os.dup(state.fd)), PARENT_PIPE_FD: str(ends[0]), "HOME": "/"}
    for fd in (int(environ[CRASH_STATE_FD]), ends[0]):
        os.set_inheritable(fd, True)
    given = supervised(environ)
    assert given is not None
    assert environ == {"HOME": "/"}
    assert not os.get_inheritable(given.crash_state.fd)
    assert not os.get_inheritable(ends[0])
    given.crash_state.session("session-1")
    assert state.read().session == "session-1"
    given.parent_pipe.close()
    os.close(ends[1])


@pytest.mark.parametrize(
    "environ",
    [{CRASH_STATE_FD: "7"}, {CRASH_STATE_FD: "x", PARENT_PIPE_FD: "8"}, {CRASH_STATE_FD: "999", PARENT_PIPE_FD: "998"}],
)
def test_a_wrong_environment_is_refused_by_name(environ: dict[str, str]) -> None:
    with pytest.raises(InvalidInput, match="FAIRLANE_CRASH_STATE_FD"):
        supervised(environ)


async def test_a_parent_pipe_detects_that_the_other_end_is_gone() -> None:
    mine, other = os.pipe()
    parent_pipe = ParentPipe(mine)
    waiting = asyncio.create_task(parent_pipe.wait())
    done, _ = await asyncio.wait([waiting], timeout=0.05)
    assert not done
    os.close(other)
    await asyncio.wait_for(waiting, 30)
    await asyncio.wait_for(parent_pipe.wait(), 30)
    parent_pipe.close()


def test_exit_codes_are_described_in_words() -> None:
    assert in_words(3) == "exited with code 3"
    assert in_words(-signal.SIGSEGV) == "was ended by SIGSEGV"
    assert in_words(-60) == "was ended by signal 60"
