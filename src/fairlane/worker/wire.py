"""The messages between a worker and its child process: JSON, each preceded by its length.

The worker sends the location of a function from its own registry; nothing in a job names a function.
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
"""The limit for a message of a child: results, progress and errors are all smaller."""
QUIET_SECONDS = 5.0
"""A child writes a message at once. After twice this time without a byte, the message is given up."""


class GarbledError(Exception):
    """The data from a child is not a message: the job function has written to the socket."""


class Hello(msgspec.Struct, frozen=True, tag="hello", kw_only=True):
    """The first message to a child: how to find the worker's modules."""

    path: list[str]
    argv: list[str]
    environ: dict[str, str | None]
    """Variables that differ from those the child was started with; None removes one."""
    modules: list[str] = []
    """Modules to import before any task: tasks may rely on what those set up."""
    log: tuple[str, str | None] | None = None
    """The level and the format of the worker's log, if they were set by `fairlane.runtime.logs.configure`."""


class Run(msgspec.Struct, frozen=True, tag="run", kw_only=True):
    """Run one job."""

    where: Where
    job: Claimed
    session: str = ""
    """The worker's session, which holds the job."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Stop the job, and end the process."""


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """The function may have begun. A child that dies before it sends this has run nothing."""


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The application is imported, and the timeout of the job begins."""


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """The progress of the job, as JSON."""

    held: Held
    value: bytes


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The job has ended. The message names it, so that data written by one job cannot end the next one."""

    held: Held
    ending: Ending


ToChild = Hello | Run | Stop
FromChild = Begun | Started | Progress | Ended

_encoder = msgspec.json.Encoder()
_to_child: msgspec.json.Decoder[ToChild] = msgspec.json.Decoder(ToChild)
_from_child: msgspec.json.Decoder[FromChild] = msgspec.json.Decoder(FromChild)


def frame(message: ToChild | FromChild) -> bytes:
    """A message as it is sent."""
    raw = _encoder.encode(message)
    return _length.pack(len(raw)) + raw


def receive(sock: socket.socket) -> ToChild | None:
    """The next message of the worker, None when the worker has ended. Blocks; used in a thread of the child."""
    head = _exactly(sock, _length.size)
    raw = _exactly(sock, *_length.unpack(head)) if head else None
    return _to_child.decode(raw) if raw else None


async def read(reader: asyncio.StreamReader) -> FromChild | None:
    """The next message of a child, None when there will be no more. Raises `GarbledError`."""
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
            # Only the second time: the loop may have been blocked, with the rest already received.
            quiet += 1
            if quiet == 2:
                raise GarbledError("an incomplete message") from None
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
