"""What a worker process leaves behind when it dies: memory that it shares with its supervisor.

The worker writes down its session, when it last renewed its lease, and which jobs have begun, by plain stores into
memory, without a system call. Each note is written first and declared valid last, by one number: whenever the worker
dies, its supervisor reads what was true. A session is noted before it is registered: one that the store does not know
is easily left, but one that the supervisor does not know keeps its jobs until its lease ends.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import threading
import time

import msgspec

from ..model.job import Held

# The sessions have numbers, each being the other one of two places, so that there always is a whole one; 0 means that
# there is none yet. Then comes the last beat.
_SESSION, _BEAT, _PLACES, _HEAD = 0, 8, (256, 512), 1024
# After the head, for each job that has begun: a number that is not 0, the length of its id, its fence, its id.
_LENGTH, _FENCE, _ID, _NOTE = 4, 8, 16, 256
_FIRST_NOTES = 60
_LOOKS = 100
"""How often a reader looks again while the writer writes; a writer that died will not write."""
_NUMBERS = 2**32 - 1
"""A reader may stand still for long. With as few numbers as a byte has, it may find the same one on another note.

Numbers and the beat are written as items of a view: each is one store. `struct` writes zeros first.
"""
_fence = struct.Struct("@q")


class CrashReading(msgspec.Struct, frozen=True):
    """What a worker has written down."""

    session: str | None
    last_beat: float | None
    """By the monotonic clock, which all processes share; None before the session's first renewal."""
    begun: tuple[Held, ...]


class CrashState:
    """The memory behind a file descriptor: a worker writes, from any of its threads; its supervisor reads."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self.fd = fd
        self._map()
        self._growing = threading.Lock()
        self._free = list(range(self._notes()))
        self._turn = 0

    @classmethod
    def make(cls) -> CrashState:
        """Empty marks; the process that is to write them is started with their descriptor."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("fairlane-marks")
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, _HEAD + _FIRST_NOTES * _NOTE)
        return cls(fd)

    def _map(self) -> None:
        self._memory = mmap.mmap(self.fd, 0)
        self._numbers = memoryview(self._memory).cast("I")
        self._beats = memoryview(self._memory).cast("d")

    def close(self) -> None:
        """Let go of the memory, which lives as long as anybody holds it."""
        self._numbers.release()
        self._beats.release()
        self._memory.close()
        os.close(self.fd)

    # -- the worker ----------------------------------------------------------------------------------------------------

    def session(self, id: str) -> None:
        """The worker goes by this session from now on. To be called before it is registered."""
        memory, raw = self._memory, id.encode()
        number = self._numbers[_SESSION // 4] % (_NUMBERS - 1) + 1
        at = _PLACES[number % 2]
        memory[at] = len(raw)
        memory[at + 1 : at + 1 + len(raw)] = raw
        self._beats[_BEAT // 8] = 0.0
        self._numbers[_SESSION // 4] = number

    def beat(self) -> None:
        """The session's lease was renewed just now."""
        self._beats[_BEAT // 8] = time.monotonic()

    def begin(self, held: Held) -> int:
        """The body of a job begins. Answers the number to `end` it by."""
        try:
            slot = self._free.pop()
        except IndexError:
            slot = self._grow()
        memory, raw = self._memory, held.id.encode()
        at = _HEAD + slot * _NOTE
        memory[at + _LENGTH] = len(raw)
        _fence.pack_into(memory, at + _FENCE, held.fence)
        memory[at + _ID : at + _ID + len(raw)] = raw
        # Another number than the last time, so that a reader notices that the note has changed under its eyes.
        self._turn = self._turn % _NUMBERS + 1
        self._numbers[at // 4] = self._turn
        return slot

    def end(self, slot: int) -> None:
        """The store knows how the body ended."""
        self._numbers[(_HEAD + slot * _NOTE) // 4] = 0
        self._free.append(slot)

    def _grow(self) -> int:
        with self._growing:
            if not self._free:
                notes = self._notes()
                os.ftruncate(self.fd, _HEAD + 2 * notes * _NOTE)
                # Whoever still writes through the old mapping writes to the same memory.
                self._map()
                self._free += range(notes, 2 * notes)
            return self._free.pop()

    def _notes(self) -> int:
        return (len(self._memory) - _HEAD) // _NOTE

    # -- the supervisor ------------------------------------------------------------------------------------------------

    def read(self) -> CrashReading:
        """What is written there now, also while the worker writes."""
        if os.fstat(self.fd).st_size != len(self._memory):
            self._map()
        begun = [self._read_note(slot) for slot in range(self._notes())]
        session, last_beat = self._read_session()
        return CrashReading(session, last_beat, tuple(held for held in begun if held is not None))

    def _read_session(self) -> tuple[str | None, float | None]:
        memory = self._memory
        for _ in range(_LOOKS):
            number = self._numbers[_SESSION // 4]
            if not number:
                break
            at = _PLACES[number % 2]
            raw = memory[at + 1 : at + 1 + memory[at]]
            last_beat = self._beats[_BEAT // 8]
            if self._numbers[_SESSION // 4] == number:
                return raw.decode(), last_beat or None
        return None, None

    def _read_note(self, slot: int) -> Held | None:
        memory, at = self._memory, _HEAD + slot * _NOTE
        for _ in range(_LOOKS):
            number = self._numbers[at // 4]
            if not number:
                break
            (fence,) = _fence.unpack_from(memory, at + _FENCE)
            raw = memory[at + _ID : at + _ID + memory[at + _LENGTH]]
            if self._numbers[at // 4] == number:
                return Held(raw.decode(), fence)
        return None
