"""A store in which the jobs of a lane whose limit changes do so one by one, and only on request of the test.

Workers that are gone lose their keys one by one as well.
"""

from __future__ import annotations

from typing import Any

import pytest
import redis

from fairlane.model.settings import LaneRule
from fairlane.store.redis import settings
from fairlane.store.redis import store as redis_store
from fairlane.store.redis.store import RedisStore
from tests.conformance.kit import Kit
from tests.servers import valkey


class DiedError(Exception):
    """The process that changes the rules dies after the first step."""


class Settling:
    """A store in which the jobs of a lane change one by one, and only on request of the test."""

    def __init__(self, store: RedisStore, kit: Kit, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(settings, "MOST_MOVED", 1)
        patch.setattr(redis_store, "MOST_MOVED_KEYS", 1)
        self.store = store
        self.kit = kit
        self._version = 0
        self._patch = patch
        self._call = store._functions.call
        patch.setattr(store._functions, "call", self._dying)

    def let_live(self) -> None:
        """Let the process that changes the rules survive from now on."""
        self._patch.setattr(self.store._functions, "call", self._call)

    async def _dying(self, verb: str, *arguments: Any) -> Any:
        if verb == "settle":
            raise DiedError
        return await self._call(verb, *arguments)

    async def change(self, *rules: LaneRule, queue: str = "default") -> bool:
        """Change the rules, and die after the first step. Returns whether that was not the last."""
        self._version += 1
        try:
            await self.kit.settings(queue, *rules, version=self._version)
        except DiedError:
            return True
        return False

    async def go_on(self, most: int = 1) -> bool:
        """Take one more step. Returns whether that was not the last."""
        return bool((await self._call("settle", most))["more"])

    def lanes(self) -> set[tuple[str, str]]:
        """The lanes that settle, each with the name of its queue."""
        prefix, found = self.store._functions._prefix, set()
        with redis.Redis(port=valkey.server().port, decode_responses=True) as client:
            for queue, number in client.hgetall(f"{prefix}queues").items():
                found |= {(queue, lane) for lane in client.hkeys(f"{prefix}settling:{number}")}
        return found

    async def end(self) -> None:
        while await self.go_on(3):
            pass
