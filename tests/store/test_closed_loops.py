"""A call that is left behind with a closed event loop is unwound by the garbage collector later, without a message."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from fairlane.store import open_store
from tests.servers.stores import empty_stores

pytestmark = pytest.mark.anyio
Call = Callable[[Any], Coroutine[Any, Any, Any]]
SLOW: dict[str, Call] = {
    "postgresql": lambda store: store._database.fetchrow("SELECT pg_sleep(30)"),
    "redis": lambda store: store._connections.call("BLPOP", "nothing", 30),
}


# Resources of the loop were not closed: the interpreter warns about them if warnings are enabled.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("kind", SLOW)
async def test_a_call_under_way_in_a_loop_that_is_closed_ends_in_silence(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    with empty_stores(kind, tmp_path) as stores:
        await _leave_behind(stores.next(), SLOW[kind])
        # The store was the last to hold it.
        gc.collect()
        assert said == []


async def _leave_behind(url: str, slow: Call) -> None:
    """Begin a call in a loop that is closed then. The store stays open, and is closed later."""
    store = await open_store(url)

    def call() -> None:
        loop = asyncio.new_event_loop()
        calling = loop.create_task(slow(store))
        loop.run_until_complete(asyncio.wait([calling], timeout=1.0))
        assert not calling.done()
        loop.close()

    await asyncio.to_thread(call)
    gc.collect()
    assert await store.queues() == []
    await store.close()
