"""What a worker and its child process say to each other: JSON, each message after its length.

The child is told by the worker where to find a function, out of the worker's own registry; nothing in a job names one.
"""

from __future__ import annotations

import asyncio
import socket
import struct

import msgspec

from ..model.job import Claimed, Held
from .body import Ending
from .task_location import Where

_length = struct.Struct("!I")
MOST_BYTES = 4 * 2**20
"""No message of a child is as long as this: results, progress and errors are bounded."""
QUIET_SECONDS = 5.0
"""A child that has begun a message writes the rest of it at once; twice this long without a byte, and it will not."""


class GarbledError(Exception):
    """What came from a child is no message: a body has written to the socket."""


class Hello(msgspec.Struct, frozen=True, tag="hello", kw_only=True):
    """The first message to a child: see modules as the worker does."""

    path: list[str]
    argv: list[str]
    environ: dict[str, str | None]
    """What was set differently for its start, as it is for the worker."""
    modules: list[str] = []
    """What to import before any task: the worker has, and tasks may rely on what that sets up."""
    log: tuple[str, str] | None = None
    """The level and the format of the worker's log, if `fairlane.runtime.logs.configure` has set them."""


class Run(msgspec.Struct, frozen=True, tag="run", kw_only=True):
    """Run one body."""

    where: Where
    job: Claimed
    session: str = ""
    """The worker's, which holds the job."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End the body, and yourself."""


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """The body may have begun; a child that dies before it said so has run nothing."""


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The application is imported: the time of the body begins."""


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """How far the body is, as JSON."""

    held: Held
    value: bytes


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The body has ended. Whose it was is said too: a body that writes to the socket could end the next one's job."""

    held: Held
    ending: Ending


ToChild = Hello | Run | Stop
FromChild = Begun | Started | Progress | Ended

_encoder = msgspec.json.Encoder()
_to_child: msgspec.json.Decoder[ToChild] = msgspec.json.Decoder(ToChild)
_from_child: msgspec.json.Decoder[FromChild] = msgspec.json.Decoder(FromChild)


def frame(message: ToChild | FromChild) -> bytes:
    """A message as it travels."""
    raw = _encoder.encode(message)
    return _length.pack(len(raw)) + raw


def receive(sock: socket.socket) -> ToChild | None:
    """The next message of the worker, None when the worker is gone. Waits; for the child's own thread."""
    head = _exactly(sock, _length.size)
    raw = _exactly(sock, *_length.unpack(head)) if head else None
    return _to_child.decode(raw) if raw else None


async def read(reader: asyncio.StreamReader) -> FromChild | None:
    """The next message of a child, None when there will be none. Raises `GarbledError`."""
    try:
        head = await reader.readexactly(1)
        (length,) = _length.unpack(head + await _rest(reader, _length.size - 1))
        if length > MOST_BYTES:
            raise GarbledError(f"a message of {length} bytes")
        return _from_child.decode(await _rest(reader, length))
    except (asyncio.IncompleteReadError, OSError):
        return None
    except msgspec.MsgspecError as exc:
        raise GarbledError(str(exc)) from None


async def _rest(reader: asyncio.StreamReader, size: int) -> bytes:
    """The rest of a message that has begun."""
    parts = bytearray()
    quiet = 0
    while len(parts) < size:
        try:
            async with asyncio.timeout(QUIET_SECONDS):
                part = await reader.read(size - len(parts))
        except TimeoutError:
            # Twice: the loop may have been held for so long, and the rest be there already.
            quiet += 1
            if quiet == 2:
                raise GarbledError("a message that does not go on") from None
            continue
        if not part:
            raise asyncio.IncompleteReadError(bytes(parts), size)
        quiet = 0
        parts += part
    return bytes(parts)


def _exactly(sock: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        try:
            part = sock.recv(size - len(parts))
        except OSError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)
