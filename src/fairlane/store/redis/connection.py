"""One connection to a server, on which one command at a time is sent and answered.

It is a connection of redis-py, which knows how to connect, encrypt and log in. After that commands go past its client
and its ways of sending and reading: those try again, look for time limits and count, and a call takes three to four
times as much processor time by them (measured). Whoever does not get the answer to a command must close the line, so
that nobody else gets it.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...errors import InvalidInput
from ..shared import sockets
from . import driver
from .address import Address, Place
from .driver_errors import Refusal
from .protocol import Conversation

NAME = "fairlane"
# A variable of the driver: which parser it is depends on what is installed.
_DriverParser: Any = driver.DefaultParser

Argument = bytes | str | int | float


class _Parser(_DriverParser):  # type: ignore[misc]  # chosen by the driver when it is imported
    """Leaves what the server refuses as it was said."""

    @classmethod
    def parse_error(cls, response: str) -> Refusal:
        return Refusal(response)


def packed(arguments: tuple[Argument, ...]) -> bytes:
    """A command as it is sent."""
    command: bytes = driver.pack_command(arguments)  # type: ignore[arg-type]  # its types know of one argument
    return command


class Line:
    """An open connection."""

    __slots__ = ("_connection", "_conversation", "_transport")

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._transport: asyncio.Transport = connection._writer.transport
        self._conversation = Conversation(self._transport)

    async def ask(self, command: bytes) -> Any:
        """Send a command, and give the answer to it; a refusal is given as well."""
        self._transport.write(command)
        return await self._conversation.next()

    async def demand(self, *arguments: Argument) -> Any:
        """The same, but a refusal is raised."""
        answer = await self.ask(packed(arguments))
        if isinstance(answer, Refusal):
            raise answer
        return answer

    def tell(self, *arguments: Argument) -> None:
        """Send a command, and leave the answer to whoever hears."""
        self._transport.write(packed(arguments))

    async def hear(self) -> Any:
        """What the server says next, asked or not; a refusal is raised."""
        said = await self._conversation.next()
        if isinstance(said, Refusal):
            raise said
        return said

    def listen(self, hear: Callable[[Any], None]) -> None:
        """Nothing is asked any more: whatever the server says goes there, and at last why the line has broken."""
        self._conversation.listen(hear)

    def is_clean(self) -> bool:
        """Whether it is open, as far as we know, and nothing has come on it that nobody asked for."""
        return not (self._transport.is_closing() or self._conversation.has_more())

    @property
    def socket(self) -> socket.socket | None:
        """Its socket, while it has one: the number of one that was closed may belong to somebody else by now."""
        return None if self._transport.is_closing() else self._transport.get_extra_info("socket")

    def is_alive(self) -> bool:
        """The same, and the kernel knows no better."""
        line = self.socket
        return line is not None and self.is_clean() and sockets.is_silent(line)

    def hang_up(self) -> None:
        """Tell the server that nobody is here any more, without the event loop."""
        if self.socket is not None:
            sockets.hang_up(self.socket)

    def close(self) -> None:
        """Close it at once, whatever it is in the middle of."""
        # Not gently: that would wait for the last word of a server that may say none.
        self._transport.abort()
        # The driver would complain of a connection that was not closed by itself.
        self._connection._close()


async def dial(address: Address, place: Place, *, sentinel: bool = False) -> Line:
    """Connect to a server, or to a sentinel, and log in. What fails is raised as the driver has it."""
    connection = _connection(address, place, sentinel)
    try:
        await connection.connect()
        line = Line(connection)
        if line.socket is not None:
            sockets.notice_silence(line.socket)
        if not sentinel:
            await _introduce(line, f"{NAME}:{address.namespace}")
    except BaseException:
        writer = connection._writer
        if writer is not None:
            writer.transport.abort()
        connection._close()
        raise
    return line


async def _introduce(line: Line, name: str) -> None:
    """Say who we are, for whoever looks at CLIENT LIST. Not every user may, and Redis 7.0 does not listen if busy."""
    try:
        await line.demand("CLIENT", "SETNAME", name)
    except Refusal as exc:
        if exc.code not in ("NOPERM", "BUSY"):
            raise


def _connection(address: Address, place: Place, sentinel: bool) -> Any:
    options: dict[str, Any] = {
        "username": address.sentinel_user if sentinel else address.user,
        "password": address.sentinel_password if sentinel else address.password,
        "db": 0 if sentinel else address.db,
        "protocol": 2,
        "parser_class": _Parser,
        # Whoever dials has a deadline, and so has every call.
        "socket_timeout": None,
        "socket_connect_timeout": None,
        "retry": driver.Retry(driver.NoBackoff(), 0),
    }
    if isinstance(place, str):
        return driver.UnixDomainSocketConnection(path=place, **options)
    host, port = place
    if not address.tls:
        return driver.Connection(host=host, port=port, **options)
    connection = driver.SSLConnection(host=host, port=port, **options)
    files = (address.ca, address.cert, address.key)
    connection.ssl_context.context = _context(*files, address.verify, tuple(map(_changed, files)))
    return connection


def _changed(file: str | None) -> int:
    """When a file was changed: certificates expire, and are replaced while we run."""
    try:
        return Path(file).stat().st_mtime_ns if file is not None else 0
    except OSError:
        return 0


@lru_cache(maxsize=4)
def _context(
    ca: str | None, cert: str | None, key: str | None, verify: bool, changed: tuple[int, ...]
) -> ssl.SSLContext:
    """Made once and kept, because it reads all certificates that the system trusts."""
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError as exc:
        raise InvalidInput("url", f"ca: cannot be read ({exc.strerror or exc})") from exc
    if cert is not None:
        try:
            # With a password, so that nobody is asked for one at the terminal.
            context.load_cert_chain(cert, key, password="")
        except OSError as exc:
            raise InvalidInput("url", f"cert, key: cannot be read ({exc.strerror or exc})") from exc
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
