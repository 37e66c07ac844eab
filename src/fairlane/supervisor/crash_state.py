"""What a worker process leaves behind when it dies: memory that it shares with its supervisor.

The worker records its session, the time of its last renewal, and which jobs have begun, by plain stores into memory,
without a system call. Each record is written first and marked as valid last, by one number, so the supervisor reads a
consistent state whenever the worker dies. A session is recorded before it is registered: leaving a session that the
store does not know is harmless, but one that the supervisor does not know would keep its jobs until its lease ends.
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

# The head: the number of the session, the last beat, and two buffers that sessions use in turn, so that one of them is
# always complete. The number 0 means that there is no session yet.
_SESSION, _BEAT, _SESSION_BUFFERS, _HEAD = 0, 8, (256, 512), 1024
# After the head, a record for each job that has begun: a number other than 0, the length of its id, its fence, its id.
_LENGTH, _FENCE, _ID, _RECORD = 4, 8, 16, 256
_FIRST_RECORDS = 60
_READS = 100
"""How often a reader tries again while the worker writes; a worker that died does not write."""
_NUMBERS = 2**32 - 1
"""A reader may be suspended for long. With as few numbers as fit in a byte, it might see the same one on a new record.

Numbers and the beat are written as items of a memoryview, which is one store each. `struct` writes zeros first.
"""
_fence = struct.Struct("@q")


class CrashReading(msgspec.Struct, frozen=True):
    """What a worker has recorded."""

    session: str | None
    last_beat: float | None
    """By the monotonic clock, which all processes share; None before the first renewal and once it is to end."""
    begun: tuple[Held, ...]


class CrashState:
    """The shared memory behind a file descriptor: a worker writes, from any thread; its supervisor reads."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self.fd = fd
        self._map()
        self._growing = threading.Lock()
        self._free = list(range(self._records()))
        self._turn = 0

    @classmethod
    def make(cls) -> CrashState:
        """An empty crash state; the process that is to write it is started with its descriptor."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("fairlane-crash-state")
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, _HEAD + _FIRST_RECORDS * _RECORD)
        return cls(fd)

    def _map(self) -> None:
        self._memory = mmap.mmap(self.fd, 0)
        self._numbers = memoryview(self._memory).cast("I")
        self._beats = memoryview(self._memory).cast("d")

    def close(self) -> None:
        """Release the memory; it exists until the last process has released it."""
        self._numbers.release()
        self._beats.release()
        self._memory.close()
        os.close(self.fd)

    # -- the worker ----------------------------------------------------------------------------------------------------

    def session(self, id: str) -> None:
        """Record the worker's session. To be called before the session is registered."""
        memory, raw = self._memory, id.encode()
        number = self._numbers[_SESSION // 4] % (_NUMBERS - 1) + 1
        at = _SESSION_BUFFERS[number % 2]
        memory[at] = len(raw)
        memory[at + 1 : at + 1 + len(raw)] = raw
        self._beats[_BEAT // 8] = 0.0
        self._numbers[_SESSION // 4] = number

    def beat(self) -> None:
        """Record that the session was renewed just now."""
        self._beats[_BEAT // 8] = time.monotonic()

    def leave(self) -> None:
        """Record that the session is about to end: from now on nobody has to renew it."""
        self._beats[_BEAT // 8] = 0.0

    def begin(self, held: Held) -> int:
        """Record that the function of a job begins. Returns the slot for `end`."""
        try:
            slot = self._free.pop()
        except IndexError:
            slot = self._grow()
        memory, raw = self._memory, held.id.encode()
        at = _HEAD + slot * _RECORD
        memory[at + _LENGTH] = len(raw)
        _fence.pack_into(memory, at + _FENCE, held.fence)
        memory[at + _ID : at + _ID + len(raw)] = raw
        # Another number than the last time, so that a concurrent reader detects the change.
        self._turn = self._turn % _NUMBERS + 1
        self._numbers[at // 4] = self._turn
        return slot

    def end(self, slot: int) -> None:
        """Record that the store has confirmed the end of a job."""
        self._numbers[(_HEAD + slot * _RECORD) // 4] = 0
        self._free.append(slot)

    def _grow(self) -> int:
        with self._growing:
            if not self._free:
                records = self._records()
                os.ftruncate(self.fd, _HEAD + 2 * records * _RECORD)
                # Another thread may still write through the old mapping, which is the same memory.
                self._map()
                self._free += range(records, 2 * records)
            return self._free.pop()

    def _records(self) -> int:
        return (len(self._memory) - _HEAD) // _RECORD

    # -- the supervisor ------------------------------------------------------------------------------------------------

    def read(self) -> CrashReading:
        """What is recorded now. May be called while the worker writes."""
        if os.fstat(self.fd).st_size != len(self._memory):
            self._map()
        begun = [self._read_record(slot) for slot in range(self._records())]
        session, last_beat = self._read_session()
        return CrashReading(session, last_beat, tuple(held for held in begun if held is not None))

    def _read_session(self) -> tuple[str | None, float | None]:
        memory = self._memory
        for _ in range(_READS):
            number = self._numbers[_SESSION // 4]
            if not number:
                break
            at = _SESSION_BUFFERS[number % 2]
            raw = memory[at + 1 : at + 1 + memory[at]]
            last_beat = self._beats[_BEAT // 8]
            if self._numbers[_SESSION // 4] == number:
                return raw.decode(), last_beat or None
        return None, None

    def _read_record(self, slot: int) -> Held | None:
        memory, at = self._memory, _HEAD + slot * _RECORD
        for _ in range(_READS):
            number = self._numbers[at // 4]
            if not number:
                break
            (fence,) = _fence.unpack_from(memory, at + _FENCE)
            raw = memory[at + _ID : at + _ID + memory[at + _LENGTH]]
            if self._numbers[at // 4] == number:
                return Held(raw.decode(), fence)
        return None
