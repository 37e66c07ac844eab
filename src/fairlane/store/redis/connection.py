"""One connection to a server, on which one command at a time is sent and answered.

redis-py opens the connection, encrypts it and logs in. After that, commands bypass its client and its streams: those
retry, check time limits and count, and hand each reply on in several steps, so a call through them takes three to four
times as much processor time (measured). A caller that does not read the reply to its command must close the connection,
so that no other caller reads that reply.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from ...errors import InvalidInput
from ..shared import sockets
from . import driver
from .address import Address, Endpoint
from .driver_errors import Refusal

NAME = "fairlane"
_NOTHING: Final = object()
# A variable of the driver: which parser it is depends on what is installed.
_DriverParser: Any = driver.DefaultParser

Argument = bytes | str | int | float


class _Parser(_DriverParser):  # type: ignore[misc]  # chosen by the driver when it is imported
    """Keeps the server's own text of an error."""

    @classmethod
    def parse_error(cls, response: str) -> Refusal:
        return Refusal(response)


def packed(arguments: tuple[Argument, ...]) -> bytes:
    """A command in wire format."""
    command: bytes = driver.pack_command(arguments)  # type: ignore[arg-type]  # its types know of one argument
    return command


class _ReplyProtocol(asyncio.Protocol):
    """Parses what the server sends. Takes over a connection on which no reply is outstanding."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._reader = driver.Reader(protocolError=driver.ProtocolError, replyError=Refusal, notEnoughData=_NOTHING)
        self._waiting: asyncio.Future[Any] | None = None
        self._deliver: Callable[[Any], None] | None = None
        self._lost: Exception | None = None
        transport.set_protocol(self)

    async def next(self) -> Any:
        """The next reply or message; only one caller may wait at a time. Raises when the connection has broken."""
        reply = self._reader.gets()
        if reply is not _NOTHING:
            return reply
        if self._lost is not None:
            raise self._lost
        self._waiting = asyncio.get_running_loop().create_future()
        return await self._waiting

    def deliver_to(self, deliver: Callable[[Any], None]) -> None:
        """From now on, pass every message and error reply to `deliver` at once, and finally the connection error."""
        self._deliver = deliver
        self.data_received(b"")
        if self._lost is not None:
            deliver(self._lost)

    def has_unread_data(self) -> bool:
        """Whether data arrived that no caller waited for, or the connection has broken."""
        return self._lost is not None or self._reader.has_data()

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        if self._deliver is not None:
            self._deliver_all(self._deliver)
            return
        waiting = self._waiting
        if waiting is None or waiting.done():
            return
        try:
            reply = self._reader.gets()
        except driver.ProtocolError as exc:
            self._fail(exc)
            return
        if reply is not _NOTHING:
            self._waiting = None
            waiting.set_result(reply)

    def _deliver_all(self, deliver: Callable[[Any], None]) -> None:
        try:
            while (message := self._reader.gets()) is not _NOTHING:
                deliver(message)
        except driver.ProtocolError as exc:
            self._fail(exc)

    def eof_received(self) -> None:
        self._fail(ConnectionResetError("the server has closed it"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(exc or ConnectionResetError("it was closed"))

    def _fail(self, exc: Exception) -> None:
        if self._lost is None:
            self._lost = exc
            if self._deliver is not None:
                self._deliver(exc)
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_exception(self._lost)


class Connection:
    """An open connection."""

    __slots__ = ("_driver_connection", "_protocol", "_transport")

    def __init__(self, driver_connection: Any) -> None:
        self._driver_connection = driver_connection
        self._transport: asyncio.Transport = driver_connection._writer.transport
        self._protocol = _ReplyProtocol(self._transport)

    async def request(self, command: bytes) -> Any:
        """Send a packed command and return the reply; an error reply is returned as a `Refusal`."""
        self._transport.write(command)
        return await self._protocol.next()

    async def execute(self, *arguments: Argument) -> Any:
        """Send a command and return the reply; an error reply is raised."""
        reply = await self.request(packed(arguments))
        if isinstance(reply, Refusal):
            raise reply
        return reply

    def send(self, *arguments: Argument) -> None:
        """Send a command; the reply is read by `receive` or goes to `deliver_to`."""
        self._transport.write(packed(arguments))

    async def receive(self) -> Any:
        """The next reply or message; an error reply is raised."""
        reply = await self._protocol.next()
        if isinstance(reply, Refusal):
            raise reply
        return reply

    def deliver_to(self, deliver: Callable[[Any], None]) -> None:
        """From now on, pass everything the server sends to `deliver`, and finally why the connection broke."""
        self._protocol.deliver_to(deliver)

    def is_clean(self) -> bool:
        """Whether it is open, as far as the event loop knows, and has no unread data."""
        return not (self._transport.is_closing() or self._protocol.has_unread_data())

    @property
    def socket(self) -> socket.socket | None:
        """The socket while it is open: the number of a closed one may belong to another connection by now."""
        return None if self._transport.is_closing() else self._transport.get_extra_info("socket")

    def is_alive(self) -> bool:
        """Whether it is clean, and the kernel has no unread data for it either."""
        open_socket = self.socket
        return open_socket is not None and self.is_clean() and sockets.is_silent(open_socket)

    def abort(self) -> None:
        """Shut the socket down without using the event loop."""
        if self.socket is not None:
            sockets.abort(self.socket)

    def close(self) -> None:
        """Close it at once, even in the middle of a command."""
        # Not gracefully: that would wait for a server that may never answer.
        self._transport.abort()
        # The driver warns of a connection that it did not close itself.
        self._driver_connection._close()


async def connect(address: Address, endpoint: Endpoint, *, sentinel: bool = False) -> Connection:
    """Connect to a server, or to a sentinel, and log in. Raises the driver's own errors."""
    driver_connection = _driver_connection(address, endpoint, sentinel)
    try:
        await driver_connection.connect()
        connection = Connection(driver_connection)
        if connection.socket is not None:
            sockets.notice_silence(connection.socket)
        if not sentinel:
            await _set_name(connection, f"{NAME}:{address.namespace}")
    except BaseException:
        writer = driver_connection._writer
        if writer is not None:
            writer.transport.abort()
        driver_connection._close()
        raise
    return connection


async def _set_name(connection: Connection, name: str) -> None:
    """Set the name that CLIENT LIST shows. Not every user has the right, and Redis 7.0 rejects it while it is busy."""
    try:
        await connection.execute("CLIENT", "SETNAME", name)
    except Refusal as exc:
        if exc.code not in ("NOPERM", "BUSY"):
            raise


def _driver_connection(address: Address, endpoint: Endpoint, sentinel: bool) -> Any:
    options: dict[str, Any] = {
        "username": address.sentinel_user if sentinel else address.user,
        "password": address.sentinel_password if sentinel else address.password,
        "db": 0 if sentinel else address.db,
        "protocol": 2,
        "parser_class": _Parser,
        # Connecting has a deadline of its own, and so has every call.
        "socket_timeout": None,
        "socket_connect_timeout": None,
        "retry": driver.Retry(driver.NoBackoff(), 0),
    }
    if isinstance(endpoint, str):
        return driver.UnixDomainSocketConnection(path=endpoint, **options)
    host, port = endpoint
    if not address.tls:
        return driver.Connection(host=host, port=port, **options)
    connection = driver.SSLConnection(host=host, port=port, **options)
    files = (address.ca, address.cert, address.key)
    connection.ssl_context.context = _context(*files, address.verify, tuple(map(_changed, files)))
    return connection


def _changed(file: str | None) -> int:
    """When a file was changed: certificates expire, and are replaced while the process runs."""
    try:
        return Path(file).stat().st_mtime_ns if file is not None else 0
    except OSError:
        return 0


@lru_cache(maxsize=4)
def _context(
    ca: str | None, cert: str | None, key: str | None, verify: bool, changed: tuple[int, ...]
) -> ssl.SSLContext:
    """Cached, because making one reads all certificates that the system trusts."""
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError as exc:
        raise InvalidInput("url", f"ca: cannot be read ({exc.strerror or exc})") from exc
    if cert is not None:
        try:
            # With an empty password, so that OpenSSL does not prompt for one at the terminal.
            context.load_cert_chain(cert, key, password="")
        except OSError as exc:
            raise InvalidInput("url", f"cert, key: cannot be read ({exc.strerror or exc})") from exc
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
