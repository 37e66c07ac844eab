"""Wake-ups between processes that share a database file, without a server: a datagram socket per subscription.

All sockets are in one directory, which thereby is the list of subscriptions. The name of a socket begins with the kinds
of topics it subscribes to, so that others are not sent to it; the rest of the name is random. Publishing reads the
directory and sends one message to each socket of the right kind: about 20 µs for one, 2 µs if there are none.

Requires that the processes run on one kernel, as the same user. Other processes rely on polling, and so do all
processes where sockets cannot be created. `publish` never blocks and never raises. A subscription that falls behind
loses messages, and then gets all its topics.
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
from ..per_process import PerProcess
from ..work import TopicWork

KINDS = "jlpqsw"
"""The first letters of job, leader, place, queue, session and worker: what a topic can be about."""
EVERYTHING = "*"
"""Sent instead of topics that do not fit into a message: it stands for all topics of a subscription."""
DATAGRAM_BYTES = 8_000 if sys.platform == "linux" else 2_000
"""The longest message. Systems other than Linux allow about 2 KiB."""
PATH_BYTES = 100
"""The longest socket path: the address holds 108 bytes on Linux, 104 elsewhere."""
NAME_BYTES = len(KINDS) + 1 + 16
FULL_QUEUE = 10
"""Messages that Linux queues for a socket at least. A subscription that finds as many may have lost some."""
MOST_DELIVERED = 10_000
"""Topics kept between two waits; a subscription with a wildcard could otherwise be flooded."""
MOST_ATTEMPTS = 3
"""Attempts to send a message to a socket that is being renamed."""
SETTLED_SECONDS = 1.0
"""A socket has its name shortly before it can be reached, so only older names count as left by a dead process."""


def meeting_place(database: Path) -> Path:
    """Return the directory of the sockets: beside the file, or a shorter path if that one is too long.

    Every process must find the same directory, so it depends only on the real path and the user, and not on ``TMPDIR``,
    which may differ between processes.
    """
    real = database.resolve()
    beside = real.with_name(f"{real.name}-wake")
    if len(os.fsencode(beside)) + 1 + NAME_BYTES <= PATH_BYTES:
        return beside
    digest = hashlib.sha256(os.fsencode(real)).hexdigest()[:16]
    shared = Path("/tmp")
    base = shared if shared.is_dir() else Path(tempfile.gettempdir())
    return base / f"fairlane-{os.geteuid()}-{digest}"


def _ours(directory: str) -> bool:
    """Return whether `directory` belongs to this user: in a shared parent another user may have created it."""
    found = os.lstat(directory)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _names(directory: str) -> list[str]:
    """Return the names of the sockets in the directory."""
    return os.listdir(directory)  # noqa: PTH208 - pathlib would make an object of each name


def _id(name: str) -> str:
    """Return the part of a socket's name that stays the same when its kinds change."""
    return name.partition("-")[2]


def _kinds(topics: Iterable[str]) -> str:
    """Return the kinds of `topics`, as they are in the name of a socket."""
    found = {topic[:1] for topic in topics}
    return KINDS if EVERYTHING in found else "".join(sorted(found))


class DatagramWakeups:
    """The `Wakeups` of one database file. `publish` may be called from any thread, and after a fork."""

    def __init__(self, database: Path) -> None:
        self._directory = str(meeting_place(database))
        self._subscriptions: set[DatagramSubscription] = set()
        self._closed = False
        self._sender: socket.socket | None = None
        # Guards the sender, which must not be closed while another thread sends through its descriptor.
        # Reentrant, because a signal handler may publish too.
        self._lock = PerProcess(threading.RLock)

    def publish(self, topics: Iterable[str]) -> None:
        """Send topics to every socket that subscribes to their kinds. Sockets of dead processes are removed."""
        try:
            names = _names(self._directory) if not self._closed and _ours(self._directory) else []
            if not names:
                return
            with self._lock.get():
                self._send_to_all(names, list(topics))
        except (OSError, ValueError):
            return

    def subscribe(self, topics: Iterable[str], on_delivery: Callable[[], None] | None = None) -> DatagramSubscription:
        """Subscribe in the running event loop. A topic that ends in ``*`` stands for all topics with this prefix."""
        if self._closed:
            raise RuntimeError("the wake-ups were closed; open the store again")
        subscription = DatagramSubscription(self._directory, topics, self._subscriptions, on_delivery)
        self._subscriptions.add(subscription)
        return subscription

    def work(self, queues: Iterable[str], on_delivery: Callable[[], None]) -> TopicWork:
        """Announce work to a worker of the running event loop."""
        return TopicWork(self, queues, on_delivery)

    def close(self) -> None:
        """Close every subscription and stop sending. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        for subscription in list(self._subscriptions):
            subscription.close()
        with self._lock.get():
            if self._sender is not None:
                self._sender.close()
                self._sender = None
        try:
            Path(self._directory).rmdir()
        except OSError:
            # Other subscriptions still use it, or it was never created.
            return

    def _send_to_all(self, names: list[str], topics: list[str]) -> None:
        messages: dict[str, bytes] = {}
        for _ in range(MOST_ATTEMPTS):
            gone = {_id(name) for name in names if not self._send_to(name, topics, messages)}
            if not gone:
                return
            # A socket whose subscription has changed has been renamed since the directory was read.
            names = [name for name in _names(self._directory) if _id(name) in gone]

    def _send_to(self, name: str, topics: list[str], messages: dict[str, bytes]) -> bool:
        """Send the topics that a socket subscribes to. False: the socket no longer exists under this name."""
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
        path = f"{self._directory}/{name}"
        try:
            self._send(message, path)
        except FileNotFoundError:
            return False
        except ConnectionRefusedError:
            _remove_dead(path)
        except OSError:
            # It is full, or belongs to another user: the wake-up is lost.
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
            # Either this socket is full, or unread messages to other sockets fill our send buffer, which blocks all
            # sending. A new sender fails only for the first reason.
            self._sender.close()
        self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sender.setblocking(False)
        self._sender.sendto(message, path)


def _remove_dead(path: str) -> None:
    """Remove the socket of a dead process."""
    try:
        found = os.lstat(path)
        if stat.S_ISSOCK(found.st_mode) and time.time() - found.st_mtime > SETTLED_SECONDS:
            Path(path).unlink()
    except OSError:
        return


class DatagramSubscription:
    """One subscription. After a fork it belongs to the parent: the child can only close its copy."""

    def __init__(
        self,
        directory: str,
        topics: Iterable[str],
        siblings: set[DatagramSubscription],
        on_delivery: Callable[[], None] | None = None,
    ) -> None:
        self._on_delivery = on_delivery
        self._directory = directory
        self._siblings = siblings
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._id = secrets.token_hex(8)
        self._path: str | None = None
        self._socket: socket.socket | None = None
        self._closed = False
        self._delivered: set[str] = set()
        self._arrived = asyncio.Event()
        self._topics: frozenset[str] = frozenset()
        self._prefixes: tuple[str, ...] = ()
        self.listen(topics)

    async def wait(self, timeout: float | None = None) -> frozenset[str]:
        """Wait for topics and return those delivered since the last call.

        A message that was too long or may have been lost counts as all topics: then a topic with ``*`` is among them as
        it was given. After `close` nothing is delivered: the call returns after `timeout`, or at once without one.
        """
        if self._closed:
            await asyncio.sleep(timeout or 0.0)
            return frozenset()
        self._drain()
        if not self._delivered:
            try:
                async with asyncio.timeout(timeout):
                    await self._arrived.wait()
            except TimeoutError:
                if not self._delivered:
                    self._ensure_socket()
        delivered = frozenset(self._delivered)
        self._delivered.clear()
        self._arrived.clear()
        return delivered

    def listen(self, topics: Iterable[str]) -> None:
        """Replace the topics of the subscription. Deliveries of topics that stay are kept."""
        wanted = frozenset(topics)
        for topic in wanted:
            if not topic or topic[0] not in KINDS + EVERYTHING:
                raise InvalidInput("topics", f"{topic!r} is not a topic; create topics with fairlane.store.wakeups")
        self._topics = wanted
        self._prefixes = tuple(topic[:-1] for topic in wanted if topic.endswith("*"))
        self._delivered = {topic for topic in self._delivered if self._matches(topic)}
        if not self._delivered:
            self._arrived.clear()
        self._ensure_socket()

    def close(self) -> None:
        """End the subscription and remove its socket. May be called from any thread."""
        if self._closed:
            return
        self._closed = True
        self._siblings.discard(self)
        if self._pid != os.getpid():
            # The name and the loop's selector are shared with the parent: close only our copy of the socket.
            if self._socket is not None:
                self._socket.close()
            return
        self._unlink()
        if self._loop.is_running() and _running_loop() is not self._loop:
            self._loop.call_soon_threadsafe(self._stop)
        else:
            self._stop()

    def _stop(self) -> None:
        self._unlink()
        self._drop_socket()
        if not self._loop.is_closed():
            # Nothing waits in a loop that is closed.
            self._arrived.set()

    def _unlink(self) -> None:
        path, self._path = self._path, None
        if path is not None:
            try:
                Path(path).unlink()
            except OSError:
                # It was already removed, or will be removed like the socket of a dead process.
                return

    def _drop_socket(self) -> None:
        if self._socket is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._socket)
            self._socket.close()
            self._socket = None

    def _ensure_socket(self) -> None:
        """Ensure that the socket exists, under the name that fits the topics.

        Also called after each wait that timed out, because a name can be lost: a cleaner of temporary files or a person
        has removed it, or it could not be created at first.
        """
        if self._closed or self._pid != os.getpid():
            return
        path = f"{self._directory}/{_kinds(self._topics)}-{self._id}"
        for _ in range(2):
            try:
                self._bind_or_rename(path)
                return
            except FileNotFoundError:
                # The socket was removed, or the directory after it was created: start over once.
                self._path = None
            except OSError:
                # Without wake-ups until the next attempt; polling continues.
                return

    def _bind_or_rename(self, path: str) -> None:
        if self._path is None:
            self._bind(path)
        elif self._path != path:
            # The socket stays the same, with the messages in it.
            Path(self._path).rename(path)
        else:
            os.lstat(path)
        self._path = path

    def _bind(self, path: str) -> None:
        self._drop_socket()
        try:
            Path(self._directory).mkdir(mode=0o700)
        except FileExistsError:
            if not _ours(self._directory):
                raise
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            listener.setblocking(False)
            listener.bind(path)
            Path(path).chmod(0o600)
        except OSError:
            listener.close()
            raise
        self._socket = listener
        self._loop.add_reader(listener, self._drain)

    def _drain(self) -> None:
        """Read all messages that have arrived."""
        messages = 0
        # Limited, so that a flood cannot block the event loop, which calls again for the rest.
        while self._socket is not None and messages < 4 * FULL_QUEUE:
            try:
                message = self._socket.recv(DATAGRAM_BYTES)
            except (BlockingIOError, InterruptedError):
                break
            messages += 1
            for topic in message.decode(errors="replace").split("\n"):
                if topic == EVERYTHING:
                    self._delivered |= self._topics
                elif self._matches(topic):
                    self._delivered.add(topic)
        if messages >= FULL_QUEUE or len(self._delivered) > MOST_DELIVERED:
            self._delivered = set(self._topics)
        if self._delivered:
            if self._on_delivery is not None:
                self._on_delivery()
            self._arrived.set()

    def _matches(self, topic: str) -> bool:
        return topic in self._topics or topic.startswith(self._prefixes)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
