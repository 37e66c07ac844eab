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
"""The timeout of BLPOP: a dead connection is noticed, and the wait ends for a session that no longer claims."""
DEADLINE_SECONDS = WAIT_SECONDS + 5.0
FRESH_SECONDS = 3.0
"""A pushed answer is used for this long after the last claim; servers push for a shorter time. A process that claims
later was suspended meanwhile, and must ask the server whether its session still exists."""
STEADY_SECONDS = 1.0
"""After a failed wait, pushes are not accepted for this long."""
AGAIN_SECONDS = 0.002
"""This long after it took a pushed answer, a worker is woken, unless it has claimed by then: the answer does not cover
jobs that came after it."""
MOST_WAITING = 1_000
"""The most connections of one event loop; each session needs one."""
_SHORT, _LONG, _NUMBER = struct.Struct(">H"), struct.Struct(">I"), struct.Struct(">d")


class Answer(NamedTuple):
    """The answer to a claim: content, headers and packed record of a job, and the topic to wake the worker with."""

    number: int
    topic: str
    parts: list[bytes]


def read(message: bytes) -> Answer:
    """Parse a pushed message; see `ANSWER` in `lua/enqueue_one.lua`."""
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
    """The list that the server pushes to, and the channel on which it sees whether the worker is connected."""
    number: int = 0
    """The claim that may be answered by a push."""
    asked_at: float = 0.0
    """When the previous claim was made."""
    asked_again: bool = False
    """Whether there was a claim since the current BLPOP began."""
    answer: Answer | None = None
    waiting: asyncio.Task[None] | None = None
    failed_at: float = float("-inf")
    again: asyncio.TimerHandle | None = None


class PushedClaims:
    """The pushed answers of one store object's sessions; each is kept until its claim is made."""

    def __init__(self, address: Address, wakeups: RedisWakeups) -> None:
        self._connections = Connections(msgspec.structs.replace(address, pool=MOST_WAITING))
        self._prefix = address.prefix
        self._wakeups = wakeups
        self._sessions: dict[str, _Session] = {}
        self._refused = False
        self._pid = os.getpid()

    def expect(self, id: str, number: int) -> bool:
        """Accept a push for the claim of this number, and for no earlier one. Returns False if none can be accepted."""
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
        """The pushed answer to the claim of this number, if it has arrived. It is returned once."""
        session = self._sessions.get(id)
        if session is None or session.answer is None or session.number != number:
            return None
        loop = asyncio.get_running_loop()
        answer, session.answer = session.answer, None
        if loop.time() - session.asked_at > FRESH_SECONDS:
            return None
        session.again = loop.call_later(AGAIN_SECONDS, self._wakeups.deliver, [answer.topic])
        return answer.parts

    def forget(self, id: str) -> None:
        """Accept no more pushes for this session."""
        session = self._sessions.pop(id, None)
        if session is not None:
            self._end(session)

    async def close(self) -> None:
        """End all waits. Does nothing in the child of a fork."""
        while self._sessions and os.getpid() == self._pid:
            self._end(self._sessions.popitem()[1])
        await self._connections.close()

    def _end(self, session: _Session) -> None:
        _forget_again(session)
        self._wakeups.hide(session.key)
        if session.waiting is not None:
            with contextlib.suppress(RuntimeError):  # its event loop is closed, and the task with it
                session.waiting.get_loop().call_soon_threadsafe(session.waiting.cancel)

    async def _wait(self, session: _Session) -> None:
        loop = asyncio.get_running_loop()
        while session.asked_again:
            session.asked_again = False
            try:
                found = await self._connections.call("BLPOP", session.key, WAIT_SECONDS, timeout=DEADLINE_SECONDS)
            except NotAllowed:
                # This user has the rights of an older version, without BLPOP. The worker is notified and claims.
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
                self._wakeups.deliver([answer.topic])
                # No new BLPOP before the next claim: it would delay the job.
                return
            # It answers an earlier claim: skip it.
            session.asked_again = True


def _forget_again(session: _Session) -> None:
    if session.again is not None:
        session.again.cancel()
        session.again = None
