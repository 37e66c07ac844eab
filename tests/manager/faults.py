"""A store that fails, hangs or answers late on demand. Everything else goes to the real store."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from inspect import iscoroutinefunction
from typing import Any, cast

from fairlane.errors import StoreUnavailable
from fairlane.store.port import Store

EVERY = "*"


class Faults:
    """The faults of each verb; `EVERY` stands for all verbs."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.errors: dict[str, Exception] = {}
        self.once: dict[str, list[Exception]] = {}
        """Errors of the next calls of a verb, one each."""
        self.hanging: set[str] = set()
        self.late: dict[str, Callable[[], None] | float] = {}
        """Seconds an answer takes after the call has happened, or what else happens before the answer."""

    def down(self, *verbs: str) -> None:
        """Let these verbs fail as if the store could not be reached."""
        for verb in verbs or (EVERY,):
            self.errors[verb] = StoreUnavailable("the line is cut")

    def up(self) -> None:
        """Let everything work."""
        self.errors.clear()
        self.hanging.clear()
        self.late.clear()

    async def before(self, verb: str) -> None:
        self.calls[verb] += 1
        error = self.errors.get(verb) or self.errors.get(EVERY)
        if error is None and self.once.get(verb):
            error = self.once[verb].pop(0)
        if error is not None:
            raise error
        if verb in self.hanging or EVERY in self.hanging:
            await asyncio.Event().wait()

    async def after(self, verb: str) -> None:
        late = self.late.get(verb)
        if callable(late):
            late()
        elif late is not None:
            await asyncio.sleep(late)


class _FaultyStore:
    def __init__(self, inner: Store, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    def __getattr__(self, verb: str) -> Any:
        real = getattr(self._inner, verb)
        if not iscoroutinefunction(real):
            return real

        def call(*args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
            return self._call(verb, real, args, kwargs)

        return call

    async def _call(self, verb: str, real: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        await self._faults.before(verb)
        answer = await real(*args, **kwargs)
        await self._faults.after(verb)
        return answer


def faulty(store: Store) -> tuple[Store, Faults]:
    """The store with faults, and the object that controls them."""
    faults = Faults()
    return cast(Store, _FaultyStore(store, faults)), faults
