"""One lock for all processes that write a file: a POSIX record lock, which belongs to a process.

The kernel releases it when its holder dies, even if the holder has forked children, unlike a lock of `flock`, which
lives on in every copy of the descriptor. It requires write permission for the file, and the kernel reports the process
that holds it. Its drawback, known from SQLite, is that closing any descriptor of the file releases the lock. So a
process has one descriptor for each lock file, shared by all its stores, and its threads get the lock in the order of
their calls.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from ...errors import StoreReadOnly, StoreUnavailable
from .alarms import ALARMS

WAIT_SECONDS = 10.0
"""How long a call waits for the lock: twice as long as a job's transaction may hold it."""
POLL_SECONDS = 0.002
PRIVATE = 0o600
MOST_WORDS = 4
Late = Callable[[StoreUnavailable], None]
"""Called in another thread, every second after the deadline, for as long as the caller waits for the lock."""


class _ThreadLock:
    """A lock that threads get in the order of their calls. Any thread may release it."""

    __slots__ = ("_mutex", "_taken", "_waiting")

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Lock] = deque()

    def acquire(self, timeout: float = -1) -> bool:
        with self._mutex:
            if not self._taken:
                self._taken = True
                return True
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        if mine.acquire(timeout=timeout):
            return True
        with self._mutex:
            if mine not in self._waiting:
                return True  # it was passed on just now
            self._waiting.remove(mine)
            return False

    def release(self) -> None:
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False


class _Shared:
    """What all locks of a process on one file share."""

    __slots__ = ("descriptors", "threads", "users")

    def __init__(self) -> None:
        self.descriptors: list[int] = []
        self.threads = _ThreadLock()
        self.users = 0


class _Files:
    """The lock files of this process, by device and inode: a file may have several names."""

    def __init__(self) -> None:
        self._door = threading.Lock()
        self._files: dict[tuple[int, int], _Shared] = {}
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        """Close the copies of the descriptors in a child. The locks belong to the parent and are not affected."""
        self._door = threading.Lock()
        files, self._files = self._files, {}
        for shared in files.values():
            for descriptor in shared.descriptors:
                with contextlib.suppress(OSError):
                    os.close(descriptor)

    def use(self, path: Path) -> _Shared:
        with self._door:
            shared = self._known(path)
            if shared is None:
                descriptor = _open(path)
                found = os.fstat(descriptor)
                shared = self._files.setdefault((found.st_dev, found.st_ino), _Shared())
                shared.descriptors.append(descriptor)
            shared.users += 1
            return shared

    def _known(self, path: Path) -> _Shared | None:
        with contextlib.suppress(OSError):
            found = path.stat()
            return self._files.get((found.st_dev, found.st_ino))
        return None

    def leave(self, shared: _Shared) -> None:
        with self._door:
            shared.users -= 1
            if shared.users:
                return
            self._files = {key: each for key, each in self._files.items() if each is not shared}
            for descriptor in shared.descriptors:
                os.close(descriptor)


_FILES = _Files()


class FileLock:
    """The lock of one file. Threads may share it. It must be released before it is closed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._shared = _FILES.use(path)
        self._pid = os.getpid()
        self._closed = False

    @classmethod
    def of(cls, database: Path) -> FileLock:
        """Return the lock that the writers of a database take."""
        return cls(database.with_name(database.name + "-lock"))

    def __enter__(self) -> None:
        """Take the lock. Raises `StoreUnavailable`, which names the holder, if it is not free in time."""
        ends = time.monotonic() + WAIT_SECONDS
        if not self._shared.threads.acquire(WAIT_SECONDS):
            raise self.taken(mine=True)
        try:
            while not self._try():
                if time.monotonic() > ends:
                    raise self.taken()
                time.sleep(POLL_SECONDS)
        except BaseException:
            self._shared.threads.release()
            raise

    def acquire(self, late: Late) -> None:
        """Take the lock without a time limit: in the kernel's queue, which is fair to all processes.

        A thread in that queue cannot be interrupted, so `late` is called once the deadline has passed.
        """
        threads = self._shared.threads
        if threads.acquire(0):
            got = False
            try:
                got = self._try()
            finally:
                if not got:
                    threads.release()
            if got:
                return

        def report_late() -> float:
            late(self.taken())
            return 1.0

        alarm = ALARMS.set(WAIT_SECONDS, report_late)
        try:
            threads.acquire()
            try:
                self._wait()
            except BaseException:
                threads.release()
                raise
        finally:
            alarm.cancel()

    def release(self) -> None:
        """Release the lock. Does nothing in the child of a fork: the lock belongs to the parent."""
        if self._pid == os.getpid():
            try:
                fcntl.lockf(self._shared.descriptors[0], fcntl.LOCK_UN)
            finally:
                self._shared.threads.release()

    def __exit__(self, *_: object) -> None:
        self.release()

    def close(self) -> None:
        """Close the file, which must not be locked by this object."""
        if not self._closed and self._pid == os.getpid():
            self._closed = True
            _FILES.leave(self._shared)

    def taken(self, *, mine: bool = False) -> StoreUnavailable:
        """Return the error of a call that waited for too long."""
        holder = None if mine else self._holder()
        owner = "another thread of this process" if mine or holder is None else _described(holder)
        return StoreUnavailable(
            f"{self._path} was locked for more than {WAIT_SECONDS:g} s by {owner}. Nothing was stored. Resume or "
            "end the holder: the lock is released when its process ends."
        )

    def _try(self) -> bool:
        try:
            fcntl.lockf(self._shared.descriptors[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        except OSError as exc:
            raise StoreUnavailable(f"{self._path} cannot be locked: {exc.strerror}") from exc
        return True

    def _wait(self) -> None:
        while True:
            try:
                fcntl.lockf(self._shared.descriptors[0], fcntl.LOCK_EX)
            except OSError as exc:
                if exc.errno != errno.EDEADLK:
                    raise StoreUnavailable(f"{self._path} cannot be locked: {exc.strerror}") from exc
                # The kernel sees processes, not threads: two that use two files each can look like a deadlock.
                time.sleep(POLL_SECONDS)
            else:
                return

    def _holder(self) -> int | None:
        """Return the process that holds the lock; 0: one that is not visible from here, None: no other process."""
        if sys.platform != "linux":
            return 0
        form = "hhqqi0q"
        asked = struct.pack(form, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        try:
            kind, _, _, _, pid = struct.unpack(form, fcntl.fcntl(self._shared.descriptors[0], fcntl.F_GETLK, asked))
        except OSError:
            return 0
        return None if kind == fcntl.F_UNLCK else int(pid)


def _open(path: Path) -> int:
    database = path.with_name(path.name.removesuffix("-lock"))
    try:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE)
        except FileExistsError:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE)
        with contextlib.suppress(OSError):
            # Like SQLite with its log: a user that may write the database may lock it too.
            os.fchmod(descriptor, database.stat().st_mode & 0o666)
        return descriptor
    except OSError as exc:
        if isinstance(exc, PermissionError) or "read-only" in str(exc).lower():
            raise StoreReadOnly(
                f"{path} cannot be written: {exc.strerror}. Check the permissions of its folder."
            ) from exc
        if isinstance(exc, FileNotFoundError | NotADirectoryError):
            # This may be temporary: a disk may be mounted there soon.
            raise StoreUnavailable(f"the folder {path.parent} does not exist; create it, or use another URL") from exc
        raise StoreUnavailable(f"{path} cannot be opened: {exc.strerror}") from exc


def _described(pid: int) -> str:
    """Describe a process. Of its command only words before the first option or URL are shown: others may be secret."""
    if not pid:
        return "a process that is not visible from here"
    words: list[str] = []
    stopped = ""
    with contextlib.suppress(OSError):
        process = Path(f"/proc/{pid}")
        for word in process.joinpath("cmdline").read_text(errors="replace").split("\0")[:MOST_WORDS]:
            if not word.isprintable() or word.startswith("--") or "://" in word or "=" in word:
                break
            words.append(word)
        if process.joinpath("stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "Tt":
            stopped = ", which is stopped"
    command = " ".join(words).strip()[:80]
    return f"process {pid}{f' ({command})' if command else ''}{stopped}"
