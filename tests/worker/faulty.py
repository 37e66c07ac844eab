"""A store that fails on demand."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from fairlane.errors import StoreUnavailable
from fairlane.store.port import Store

from .yard import PATIENCE


class Faulty:
    """Fails before the call, after it (its answer is lost), hangs, or raises what it is given."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.fail: Callable[[str], str | None] = lambda verb: None
        self.refuse: Callable[[str, tuple[Any, ...]], None] = lambda verb, args: None
        self.answered: Callable[[str, Any], Awaitable[None]] | None = None
        """Awaited with each answer, before the caller gets it."""
        self.calls: Counter[str] = Counter()

    def __getattr__(self, verb: str) -> Any:
        real = getattr(self.store, verb)
        if not asyncio.iscoroutinefunction(real):
            return real

        async def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[verb] += 1
            how = self.fail(verb)
            self.refuse(verb, args)
            if how == "before":
                raise StoreUnavailable("the store is away")
            if how == "hang":
                await asyncio.Event().wait()
            answer = await real(*args, **kwargs)
            if how == "after":
                raise StoreUnavailable("the answer was lost")
            if self.answered is not None:
                await self.answered(verb, answer)
            return answer

        return call


async def wait_for(condition: Callable[[], Awaitable[bool]] | Callable[[], bool]) -> None:
    """Wait until it holds."""
    async with asyncio.timeout(PATIENCE):
        while True:
            met = condition()
            if met if isinstance(met, bool) else await met:
                return
            await asyncio.sleep(0.01)
