"""Answers to claims that come before they are asked for.

A worker that got nothing may be sent the next job instead of being told to come for it (`lua/idle.lua`). It waits for
that on a connection of its own, by BLPOP: of all that a server has to write after a step, it writes first what somebody
was blocked for. What is lost on the way comes as the answer to the claim.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from ...errors import StoreError
from .address import Address
from .connections import Connections
from .failures import NotAllowed

WAIT_SECONDS = 20
"""After that the server says that there was nothing: a dead connection shows, and nobody waits who claims no more."""
PATIENCE = WAIT_SECONDS + 5.0
MOST_WAITING = 1_000
"""Connections of one event loop, one for each session."""
_SHORT, _LONG, _NUMBER = struct.Struct(">H"), struct.Struct(">I"), struct.Struct(">d")


class Answer(NamedTuple):
    """What a claim is answered: content, headers and ticket of a job, and the topic it is about."""

    number: int
    topic: str
    parts: list[bytes]


def read(message: bytes) -> Answer:
    """Take apart what was sent; see `ANSWER` in `lua/single.lua`."""
    at = _NUMBER.size

    def next_part(length: struct.Struct) -> bytes:
        nonlocal at
        (size,) = length.unpack_from(message, at)
        at += length.size + size
        return message[at - size : at]

    topic, content, headers = next_part(_SHORT), next_part(_LONG), next_part(_LONG)
    return Answer(int(_NUMBER.unpack_from(message)[0]), topic.decode(), [content, headers, message[at:]])


@dataclass
class _Session:
    number: int
    """Of the claim that may be answered ahead."""
    parts: list[bytes] | None = None
    waiting: asyncio.Task[None] | None = None


class Ahead:
    """What the sessions of one store object are sent ahead, each answer until it is asked for.

    `tell` is told the topic of what has come, in the event loop of the claims.
    """

    def __init__(self, address: Address, tell: Callable[[list[str]], None]) -> None:
        self._connections = Connections(msgspec.structs.replace(address, pool=MOST_WAITING))
        self._prefix = address.prefix
        self._tell = tell
        self._sessions: dict[str, _Session] = {}
        self._refused = False
        self._pid = os.getpid()

    def expect(self, id: str, number: int) -> bool:
        """The claim of this number may be answered ahead from now on, and none before it. False: none at all may."""
        if self._refused:
            return False
        session = self._sessions.get(id)
        if session is None:
            session = self._sessions[id] = _Session(number)
        session.number, session.parts = number, None
        loop = asyncio.get_running_loop()
        waiting = session.waiting
        if waiting is None or waiting.done() or waiting.get_loop() is not loop:
            session.waiting = loop.create_task(self._wait(id, session))
        return True

    def take(self, id: str, number: int) -> list[bytes] | None:
        """What the claim of this number is answered, if that has come; once."""
        session = self._sessions.get(id)
        if session is None or session.number != number:
            return None
        parts, session.parts = session.parts, None
        return parts

    def forget(self, id: str) -> None:
        """No claim of this session is answered ahead any more."""
        session = self._sessions.pop(id, None)
        if session is not None:
            _end(session)

    async def close(self) -> None:
        """Wait for nothing any more. In the child of a fork nothing happens."""
        while self._sessions and os.getpid() == self._pid:
            _end(self._sessions.popitem()[1])
        await self._connections.close()

    async def _wait(self, id: str, session: _Session) -> None:
        key = f"{self._prefix}ahead:{id}"
        number: int | None = None
        while number != session.number:
            try:
                found = await self._connections.call("BLPOP", key, WAIT_SECONDS, timeout=PATIENCE)
            except NotAllowed:
                # The rights of this user are those of an older version. Then it is told, and comes.
                self._refused = True
                return
            except StoreError:
                found = None
            if found is None:
                # The next claim asks again, and without it nothing is sent ahead.
                return
            # What was left from an earlier claim is passed over.
            number, topic, parts = read(found[1])
        session.parts = parts
        self._tell([topic])


def _end(session: _Session) -> None:
    if session.waiting is not None and not session.waiting.get_loop().is_closed():
        session.waiting.get_loop().call_soon_threadsafe(session.waiting.cancel)
