"""A connection that runs scripts, for code that must not be slowed down: short timeouts and a circuit breaker.

`call` returns the reply of a script. `send` does not wait for it: replies are read some commands later, many at once,
so an error is noticed late and a task does not wait for the network. After a failure the server is left alone for some
time, in which both raise `StoreUnavailable` at once. An outage is logged once when it begins and once when it is over.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

import redis
from hiredis import Reader, pack_command
from redis.exceptions import InvalidResponse, NoScriptError, ResponseError

from ....errors import InvalidInput, StoreUnavailable

log = logging.getLogger(__name__)

SCHEMES = {
    "redis": "redis",
    "valkey": "redis",
    "rediss": "rediss",
    "valkeys": "rediss",
    "unix": "unix",
}
TIMEOUT = 1.0
"""Seconds to connect, and to wait for a reply."""
MOST_UNREAD = 16
"""How many replies are left unread: reading them together saves a system call for each."""
SHORTEST_PAUSE = 0.5
LONGEST_PAUSE = 5.0
READ_SIZE = 65_536


class Script:
    """A Lua script, by the name of its file."""

    __slots__ = ("digest", "name", "source")

    def __init__(self, name: str) -> None:
        folder = files(__package__) / "lua"
        self.name = name
        self.source = (folder / "head.lua").read_text() + (folder / f"{name}.lua").read_text()
        self.digest = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()


@cache
def script(name: str) -> Script:
    """The script of this name."""
    return Script(name)


class Address:
    """The URL of the server. Its text form contains no password."""

    def __init__(self, url: str) -> None:
        if not isinstance(url, str):
            raise InvalidInput("url", "must be a string such as redis://host:port/database")
        scheme, separator, rest = url.partition("://")
        known = SCHEMES.get(scheme.lower())
        if known is None or not separator:
            raise InvalidInput("url", "must begin with redis://, rediss://, valkey://, valkeys:// or unix://")
        try:
            parts = urlsplit(f"{known}://{rest}")
            login = "" if parts.username is None and parts.password is None else "***@"
            location = f"{parts.hostname or ''}{'' if parts.port is None else f':{parts.port}'}{parts.path}"
            self._pool = redis.ConnectionPool.from_url(
                parts.geturl(), protocol=2, socket_timeout=TIMEOUT, socket_connect_timeout=TIMEOUT
            )
            # Connects to nothing, and rejects options that do not exist.
            self._pool.make_connection()
        except (TypeError, ValueError):
            # Not quoted: the message of the parser may repeat a password.
            raise InvalidInput(
                "url", "is not a valid URL; the form is redis://user:password@host:port/database"
            ) from None
        self._shown = f"{scheme.lower()}://{login}{location}"

    def connect(self) -> Channel:
        """Open a connection: redis-py encrypts it, logs in and selects the database."""
        connection: Any = self._pool.make_connection()
        connection.connect()
        return Channel(connection)

    def __str__(self) -> str:
        return self._shown

    def __repr__(self) -> str:
        return f"Address({self._shown!r})"


class Channel:
    """Writes commands to an open connection and reads replies.

    redis-py's own methods for that take as much CPU time as the system calls, for each task of a busy producer.
    """

    __slots__ = ("_connection", "_reader", "_socket", "known")

    def __init__(self, connection: Any) -> None:
        self.known: set[Script] = set()
        """Scripts that the server has run."""
        self._connection = connection
        self._socket: Any = connection._sock
        self._reader = Reader(protocolError=InvalidResponse, replyError=ResponseError)

    def write(self, words: tuple[Any, ...]) -> None:
        """Send a command."""
        self._socket.sendall(pack_command(words))

    def read(self) -> Any:
        """Read the next reply. Raises it if it is an error."""
        gets = self._reader.gets
        while (reply := gets()) is False:
            data = self._socket.recv(READ_SIZE)
            if not data:
                raise redis.ConnectionError("the server has closed the connection")
            self._reader.feed(data)
        if isinstance(reply, ResponseError):
            raise NoScriptError(str(reply)) if str(reply).startswith("NOSCRIPT") else reply
        return reply

    def close(self) -> None:
        """Close the connection."""
        self._connection.disconnect()


class ScriptConnection:
    """Runs scripts over one connection that all threads of a process share."""

    def __init__(self, address: Address, prefix: str, recovered: Callable[[], None] | None = None) -> None:
        self._address = address
        self._prefix = prefix
        self._recovered = recovered
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._unread: list[tuple[Script, tuple[str | int, ...]]] = []
        """The commands whose replies were not read yet."""
        self._failures = 0
        self._closed_until = 0.0

    @property
    def failing(self) -> bool:
        """Whether the last command failed."""
        return self._failures > 0

    def call(self, script: Script, *args: str | int) -> Any:
        """Run a script and return its reply."""
        with self._lock:
            reply = self._attempt(script, args, wait=True)
        self._works()
        return reply

    def send(self, script: Script, *args: str | int) -> None:
        """Run a script without waiting for its reply."""
        with self._lock:
            self._attempt(script, args, wait=False)
        self._works()

    def close(self) -> None:
        """Read the reply that is due and close the connection. It is safe to call it twice."""
        with self._lock:
            try:
                if self._channel is not None:
                    self._read_unread(self._channel)
            except (redis.RedisError, OSError):
                pass
            self._disconnect()

    def _attempt(self, script: Script, args: tuple[str | int, ...], *, wait: bool) -> Any:
        if self._failures and time.monotonic() < self._closed_until:
            raise StoreUnavailable(f"{self._address} failed recently; it is not called again for some time")
        reused = self._channel is not None
        try:
            return self._run(script, args, wait)
        except (redis.ConnectionError, OSError) as exc:
            self._disconnect()
            if not reused or isinstance(exc, TimeoutError | redis.TimeoutError):
                raise self._failed(exc) from None
        except redis.RedisError as exc:
            # Replies of other commands may be unread.
            self._disconnect()
            raise self._failed(exc) from None
        except BaseException:
            # A signal handler has raised, such as that of a soft time limit: a reply could be taken for another's.
            self._disconnect()
            raise
        try:
            # The server may have closed an idle connection. Scripts can be repeated.
            return self._run(script, args, wait)
        except (redis.RedisError, OSError) as exc:
            self._disconnect()
            raise self._failed(exc) from None
        except BaseException:
            self._disconnect()
            raise

    def _run(self, script: Script, args: tuple[str | int, ...], wait: bool) -> Any:
        channel = self._channel
        if channel is None:
            self._unread = []
            channel = self._channel = self._address.connect()
        # A new server does not know a script. The reply says so: the first one is not left unread.
        wait = wait or script not in channel.known
        if self._unread and (wait or len(self._unread) >= MOST_UNREAD):
            self._read_unread(channel)
        channel.write(("EVALSHA", script.digest, 1, self._prefix, *args))
        if not wait:
            self._unread.append((script, args))
            return None
        try:
            reply = channel.read()
        except NoScriptError:
            reply = self._evaluate(channel, script, args)
        channel.known.add(script)
        return reply

    def _evaluate(self, channel: Channel, script: Script, args: tuple[str | int, ...]) -> Any:
        """Run a script that the server does not know yet."""
        channel.write(("EVAL", script.source, 1, self._prefix, *args))
        return channel.read()

    def _read_unread(self, channel: Channel) -> None:
        unread, self._unread = self._unread, []
        unknown = []
        for command in unread:
            try:
                channel.read()
            except NoScriptError:
                unknown.append(command)
        # After all replies are read, or these would be taken for each other's.
        for script, args in unknown:
            self._evaluate(channel, script, args)

    def _disconnect(self) -> None:
        channel, self._channel, self._unread = self._channel, None, []
        if channel is not None:
            channel.close()

    def _failed(self, exc: Exception) -> StoreUnavailable:
        first_line = str(exc).strip().partition("\n")[0][:200] or type(exc).__name__
        if not self._failures:
            log.warning(
                "the load balancer cannot use %s (%s); tasks are published in turn until it works again",
                *(self._address, first_line),
            )
        self._failures += 1
        self._closed_until = time.monotonic() + min(SHORTEST_PAUSE * 2 ** (self._failures - 1), LONGEST_PAUSE)
        return StoreUnavailable(f"{self._address} cannot be used ({first_line})")

    def _works(self) -> None:
        if self._failures:
            self._failures = 0
            log.info("the load balancer can use %s again", self._address)
            if self._recovered is not None:
                self._recovered()
