"""The store under test, opened once more: by a second object in this process, or by another process.

The suite knows no backend, so the one place that does, its conftest, is asked.
"""

from __future__ import annotations

from fairlane.store.clock import Clock
from fairlane.store.port import Store

from . import conftest


async def open_again(url: str, clock: Clock | None = None, *, create: bool = True) -> Store:
    """A store of its own at `url`, on the real clock unless `clock` is given."""
    opening = conftest.open_store(url, clock=clock, create=create)  # type: ignore[attr-defined]  # imported there
    store: Store = await opening
    return store
