"""Wake-ups between processes that share a database file, without a server: a datagram socket per listener.

All sockets lie in one directory, so the directory is the list of listeners. A socket's name begins with the
kinds of topics heard there, so that nobody is woken for what cannot concern him; the rest of it is random.
Publishing is one look at the directory and one send for each listener that may care: about 20 µs for one,
2 µs where nobody ever listened.

May assume: the processes run on one kernel, as the same user. Others are not heard and fall back on polling,
and so does everybody where sockets cannot be made. Promises: `publish` never blocks and never raises. A
listener that does not keep up loses messages, and is then told to look at everything.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import secrets
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ...errors import InvalidInput

KINDS = "jlpqsw"
"""The first letters of job, leader, place, queue, session and worker: what a topic can be about."""
EVERYTHING = "*"
"""Sent instead of the topics when they do not fit: whoever hears it looks at all it listens to."""
DATAGRAM_BYTES = 8_000 if sys.platform == "linux" else 2_000
"""The longest message. Elsewhere than on Linux the system itself allows about 2 KiB."""
PATH_BYTES = 100
"""The longest socket path: the address holds 108 bytes on Linux, 104 elsewhere."""
NAME_BYTES = len(KINDS) + 1 + 16
FULL_QUEUE = 10
"""Messages that Linux keeps for a listener, at least. Whoever finds as many waiting may have lost some."""
MOST_HEARD = 10_000
"""Topics remembered between two waits; a listener with a wildcard could otherwise be flooded."""
MOST_LOOKS = 3
"""How often one message looks for a listener that is just changing its name."""
SETTLED_SECONDS = 1.0
"""A socket has a name a moment before it can be reached, so only older names count as left by the dead."""


def meeting_place(database: Path) -> Path:
    """The directory of the sockets: beside the file, or a short one where that path is too long.

    Every process must find the same one, so it hangs on nothing but the real path and the user; not on
    ``TMPDIR``, which may differ between two processes.
    """
    real = database.resolve()
    beside = real.with_name(f"{real.name}-wake")
    if len(os.fsencode(beside)) + 1 + NAME_BYTES <= PATH_BYTES:
        return beside
    digest = hashlib.sha256(os.fsencode(real)).hexdigest()[:16]
    shared = Path("/tmp")
    base = shared if shared.is_dir() else Path(tempfile.gettempdir())
    return base / f"fairlane-{os.geteuid()}-{digest}"


def _ours(place: str) -> bool:
    """Whether `place` is a directory of this user: in a shared one anybody could have made it before us."""
    found = os.lstat(place)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _names(place: str) -> list[str]:
    """What lies in the directory."""
    return os.listdir(place)  # noqa: PTH208 - pathlib would make an object of each name


def _id(name: str) -> str:
    """The part of a socket's name that stays while its kinds change."""
    return name.partition("-")[2]


def _kinds(topics: Iterable[str]) -> str:
    """The kinds of `topics`, as they stand in a socket's name."""
    found = {topic[:1] for topic in topics}
    return KINDS if EVERYTHING in found else "".join(sorted(found))


class DatagramWakeups:
    """The `Wakeups` of one database file. `publish` may be called from any thread, and after a fork."""

    def __init__(self, database: Path) -> None:
        self._place = str(meeting_place(database))
        self._ears: set[DatagramSubscription] = set()
        self._closed = False
        self._pid = os.getpid()
        self._sender: socket.socket | None = None
        # Guards the sender, which must not be closed while another thread sends through its descriptor.
        # Reentrant, because a signal handler may publish too.
        self._lock = threading.RLock()

    def publish(self, topics: Iterable[str]) -> None:
        """Tell every listener of these kinds of topics; the dead ones are removed."""
        try:
            listeners = _names(self._place) if not self._closed and _ours(self._place) else []
            if not listeners:
                return
            self._notice_fork()
            with self._lock:
                self._tell(listeners, list(topics))
        except (OSError, ValueError):
            return

    def subscribe(self, topics: Iterable[str], ring: Callable[[], None] | None = None) -> DatagramSubscription:
        """Listen from the running event loop. A topic ending in ``*`` stands for all that begin like it."""
        if self._closed:
            raise RuntimeError("the wake-ups were closed; open the store again")
        ear = DatagramSubscription(self._place, topics, self._ears, ring)
        self._ears.add(ear)
        return ear

    def close(self) -> None:
        """Close every subscription and stop sending. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        for ear in list(self._ears):
            ear.close()
        self._notice_fork()
        with self._lock:
            if self._sender is not None:
                self._sender.close()
                self._sender = None
        try:
            Path(self._place).rmdir()
        except OSError:
            # Others listen there still, or nobody ever did.
            return

    def _notice_fork(self) -> None:
        if self._pid != os.getpid():
            # The lock was copied as it was, and whoever held it does not exist here.
            self._lock = threading.RLock()
            self._pid = os.getpid()

    def _tell(self, listeners: list[str], topics: list[str]) -> None:
        messages: dict[str, bytes] = {}
        for _ in range(MOST_LOOKS):
            gone = {_id(name) for name in listeners if not self._tell_one(name, topics, messages)}
            if not gone:
                return
            # A listener that changed what it listens to has a new name since the directory was read.
            listeners = [name for name in _names(self._place) if _id(name) in gone]

    def _tell_one(self, name: str, topics: list[str], messages: dict[str, bytes]) -> bool:
        """Send what `name` may care for. False: nobody has that name any more."""
        kinds = name.partition("-")[0]
        message = messages.get(kinds)
        if message is None:
            text = "\n".join([topic for topic in topics if topic[:1] in kinds])
            message = text.encode(errors="replace")
            if len(message) > DATAGRAM_BYTES:
                message = EVERYTHING.encode()
            messages[kinds] = message
        if not message:
            return True
        path = f"{self._place}/{name}"
        try:
            self._send(message, path)
        except FileNotFoundError:
            return False
        except ConnectionRefusedError:
            _remove_dead(path)
        except OSError:
            # It is full, or belongs to somebody else: a hint less.
            return True
        return True

    def _send(self, message: bytes, path: str) -> None:
        if self._sender is not None:
            try:
                self._sender.sendto(message, path)
                return
            except OSError as exc:
                if exc.errno not in (errno.EAGAIN, errno.ENOBUFS):
                    raise
            # Either this listener is full, or messages that others do not read fill our own send buffer and
            # silence us towards everybody. A fresh sender tells: it fails for the first reason alone.
            self._sender.close()
        self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sender.setblocking(False)
        self._sender.sendto(message, path)


def _remove_dead(path: str) -> None:
    """Take away the name that a process left behind when it died."""
    try:
        found = os.lstat(path)
        if stat.S_ISSOCK(found.st_mode) and time.time() - found.st_mtime > SETTLED_SECONDS:
            Path(path).unlink()
    except OSError:
        return


class DatagramSubscription:
    """One listener's ear. After a fork it belongs to the parent alone: the child can only close its copy."""

    def __init__(
        self,
        place: str,
        topics: Iterable[str],
        siblings: set[DatagramSubscription],
        ring: Callable[[], None] | None = None,
    ) -> None:
        self._bell = ring
        self._place = place
        self._siblings = siblings
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._id = secrets.token_hex(8)
        self._path: str | None = None
        self._socket: socket.socket | None = None
        self._closed = False
        self._heard: set[str] = set()
        self._news = asyncio.Event()
        self._topics: frozenset[str] = frozenset()
        self._prefixes: tuple[str, ...] = ()
        self.listen(topics)

    async def wait(self, timeout: float | None = None) -> frozenset[str]:
        """The topics heard since the last call.

        A message that was too long, or that may have been lost, counts as all topics: then a topic with ``*``
        is among them as it was given. After `close` nothing is heard: the call returns when `timeout` has
        passed, and at once without one.
        """
        if self._closed:
            await asyncio.sleep(timeout or 0.0)
            return frozenset()
        self._drain()
        if not self._heard:
            try:
                async with asyncio.timeout(timeout):
                    await self._news.wait()
            except TimeoutError:
                if not self._heard:
                    self._appear()
        heard = frozenset(self._heard)
        self._heard.clear()
        self._news.clear()
        return heard

    def listen(self, topics: Iterable[str]) -> None:
        """Hear these topics, instead of those before. What was heard of the topics that stay is kept."""
        wanted = frozenset(topics)
        for topic in wanted:
            if not topic or topic[0] not in KINDS + EVERYTHING:
                raise InvalidInput("topics", f"{topic!r} is no topic; fairlane.store.wakeups makes them")
        self._topics = wanted
        self._prefixes = tuple(topic[:-1] for topic in wanted if topic.endswith("*"))
        self._heard = {topic for topic in self._heard if self._hears(topic)}
        if not self._heard:
            self._news.clear()
        self._appear()

    def close(self) -> None:
        """Hear nothing more, and take the name away. Other threads than the event loop's may call it too."""
        if self._closed:
            return
        self._closed = True
        self._siblings.discard(self)
        if self._pid != os.getpid():
            # The name and the loop's selector are shared with the parent: only our copy of the socket goes.
            if self._socket is not None:
                self._socket.close()
            return
        self._vanish()
        if self._loop.is_running() and _running_loop() is not self._loop:
            self._loop.call_soon_threadsafe(self._fall_silent)
        else:
            self._fall_silent()

    def _fall_silent(self) -> None:
        self._vanish()
        self._drop_socket()
        if not self._loop.is_closed():
            # In a loop that is gone nobody waits any more.
            self._news.set()

    def _vanish(self) -> None:
        path, self._path = self._path, None
        if path is not None:
            try:
                Path(path).unlink()
            except OSError:
                # Somebody else took it away, or may; then it goes as the name of the dead.
                return

    def _drop_socket(self) -> None:
        if self._socket is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._socket)
            self._socket.close()
            self._socket = None

    def _appear(self) -> None:
        """See to it that there is a socket, under the name that fits the topics.

        Called after each wait in vain too, because a name can be lost: to a cleaner of temporary files, to
        somebody who tidied up by hand, or because it could not be made at first.
        """
        if self._closed or self._pid != os.getpid():
            return
        path = f"{self._place}/{_kinds(self._topics)}-{self._id}"
        for _ in range(2):
            try:
                self._take_name(path)
                return
            except FileNotFoundError:
                # The name is gone, or the directory between making it and using it: once more from the start.
                self._path = None
            except OSError:
                # Deaf until the next try; polling goes on.
                return

    def _take_name(self, path: str) -> None:
        if self._path is None:
            self._bind(path)
        elif self._path != path:
            # The socket stays, and with it all that waits in it.
            Path(self._path).rename(path)
        else:
            os.lstat(path)
        self._path = path

    def _bind(self, path: str) -> None:
        self._drop_socket()
        try:
            Path(self._place).mkdir(mode=0o700)
        except FileExistsError:
            if not _ours(self._place):
                raise
        ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            ear.setblocking(False)
            ear.bind(path)
            Path(path).chmod(0o600)
        except OSError:
            ear.close()
            raise
        self._socket = ear
        self._loop.add_reader(ear, self._drain)

    def _drain(self) -> None:
        """Take in everything that has arrived."""
        messages = 0
        # Bounded, so that a flood cannot keep the loop here; what is left calls again.
        while self._socket is not None and messages < 4 * FULL_QUEUE:
            try:
                message = self._socket.recv(DATAGRAM_BYTES)
            except (BlockingIOError, InterruptedError):
                break
            messages += 1
            for topic in message.decode(errors="replace").split("\n"):
                if topic == EVERYTHING:
                    self._heard |= self._topics
                elif self._hears(topic):
                    self._heard.add(topic)
        if messages >= FULL_QUEUE or len(self._heard) > MOST_HEARD:
            self._heard = set(self._topics)
        if self._heard:
            if self._bell is not None:
                self._bell()
            self._news.set()

    def _hears(self, topic: str) -> bool:
        return topic in self._topics or topic.startswith(self._prefixes)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
