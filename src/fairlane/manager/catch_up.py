"""What a worker that is about to end does in place of the leader, which may not come by in time."""

from __future__ import annotations

from contextlib import suppress

from ..errors import FairlaneError
from ..store.port import Store
from .promoter import BATCH


async def catch_up(store: Store) -> None:
    """Make pending what is due, and admit what was stored in a user's transaction.

    Like all passes of the leader it is safe in any number of processes at once. An outage is no error.
    """
    with suppress(FairlaneError):
        while (await store.promote(limit=BATCH)).more:
            pass
        while (await store.admit(limit=BATCH)).more:
            pass
