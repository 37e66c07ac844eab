"""Claims that the server answers before the worker makes them.

A worker whose claim returned nothing may be sent the next job instead of a notification (`lua/idle_workers.lua`). It
waits with BLPOP on a connection of its own: after a step, a server writes replies to blocked clients first. A push that
is lost on the way is repeated as the answer to the claim.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from ...errors import StoreError
from .address import Address
from .connection_pool import Connections
from .driver_errors import NotAllowed
from .wakeups import RedisWakeups

WAIT_SECONDS = 20
"""After that the server says that there was nothing: a dead connection shows, and nobody waits who claims no more."""
PATIENCE = WAIT_SECONDS + 5.0
FRESH_SECONDS = 3.0
"""Who has not claimed for longer than a server sends anything ahead stood still meanwhile, and must ask whether the
session still is."""
STEADY_SECONDS = 1.0
"""How long a wait must have lasted after one that failed, before anything is sent ahead again."""
AGAIN_SECONDS = 0.002
"""After an answer that came ahead the worker is told to look, unless it has claimed by then: the answer says nothing
of what came after it."""
MOST_WAITING = 1_000
"""Connections of one event loop, one for each session."""
_SHORT, _LONG, _NUMBER = struct.Struct(">H"), struct.Struct(">I"), struct.Struct(">d")


class Answer(NamedTuple):
    """What a claim is answered: content, headers and ticket of a job, and the topic it is about."""

    number: int
    topic: str
    parts: list[bytes]


def read(message: bytes) -> Answer:
    """Take apart what was sent; see `ANSWER` in `lua/enqueue_one.lua`."""
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
    key: str
    """Where the server puts what it sends, and the channel on which it sees whether anybody is there."""
    number: int = 0
    """Of the claim that may be answered ahead."""
    asked_at: float = 0.0
    """When the claim before it was made."""
    asked_again: bool = False
    """Whether there was a claim since the server was asked to wait."""
    answer: Answer | None = None
    waiting: asyncio.Task[None] | None = None
    failed_at: float = float("-inf")
    again: asyncio.TimerHandle | None = None


class Ahead:
    """What the sessions of one store object are sent ahead, each answer until it is asked for."""

    def __init__(self, address: Address, wakeups: RedisWakeups) -> None:
        self._connections = Connections(msgspec.structs.replace(address, pool=MOST_WAITING))
        self._prefix = address.prefix
        self._wakeups = wakeups
        self._sessions: dict[str, _Session] = {}
        self._refused = False
        self._pid = os.getpid()

    def expect(self, id: str, number: int) -> bool:
        """The claim of this number may be answered ahead from now on, and none before it. False: not even this."""
        session = self._sessions.get(id)
        if session is None:
            session = self._sessions[id] = _Session(f"{self._prefix}ahead:{id}")
        _forget_again(session)
        loop = asyncio.get_running_loop()
        session.number, session.answer = number, None
        session.asked_at, session.asked_again = loop.time(), True
        if self._refused or not self._wakeups.show(session.key):
            return False
        waiting = session.waiting
        if waiting is None or waiting.done() or waiting.get_loop() is not loop:
            session.waiting = loop.create_task(self._wait(session))
        return loop.time() - session.failed_at > STEADY_SECONDS

    def take(self, id: str, number: int) -> list[bytes] | None:
        """What the claim of this number is answered, if that has come; once."""
        session = self._sessions.get(id)
        if session is None or session.answer is None or session.number != number:
            return None
        loop = asyncio.get_running_loop()
        answer, session.answer = session.answer, None
        if loop.time() - session.asked_at > FRESH_SECONDS:
            return None
        session.again = loop.call_later(AGAIN_SECONDS, self._wakeups.tell, [answer.topic])
        return answer.parts

    def forget(self, id: str) -> None:
        """No claim of this session is answered ahead any more."""
        session = self._sessions.pop(id, None)
        if session is not None:
            self._end(session)

    async def close(self) -> None:
        """Wait for nothing any more. In the child of a fork nothing happens."""
        while self._sessions and os.getpid() == self._pid:
            self._end(self._sessions.popitem()[1])
        await self._connections.close()

    def _end(self, session: _Session) -> None:
        _forget_again(session)
        self._wakeups.hide(session.key)
        if session.waiting is not None:
            with contextlib.suppress(RuntimeError):  # its event loop is closed, and with it everything has ended
                session.waiting.get_loop().call_soon_threadsafe(session.waiting.cancel)

    async def _wait(self, session: _Session) -> None:
        loop = asyncio.get_running_loop()
        while session.asked_again:
            session.asked_again = False
            try:
                found = await self._connections.call("BLPOP", session.key, WAIT_SECONDS, timeout=PATIENCE)
            except NotAllowed:
                # The rights of this user are those of an older version. Then it is told, and comes.
                self._refused = True
                return
            except StoreError:
                session.failed_at = loop.time()
                return
            if found is None:
                continue
            answer = read(found[1])
            if answer.number == session.number:
                session.answer = answer
                self._wakeups.tell([answer.topic])
                # Not asked for more before the next claim: the job is not to wait for that.
                return
            # What was left from an earlier claim is passed over.
            session.asked_again = True


def _forget_again(session: _Session) -> None:
    if session.again is not None:
        session.again.cancel()
        session.again = None
