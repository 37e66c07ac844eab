"""A manager in a process of its own, to be killed or stopped: it prints when it leads and when it does not.

Called with the URL of the store, the name of its session, and the scale of its intervals.
"""

from __future__ import annotations

import asyncio
import logging
import sys

from fairlane.manager.manager import Manager
from fairlane.model.intervals import Intervals
from fairlane.store import open_store


def tell(term: int | None) -> None:
    sys.stdout.write(f"{'follows' if term is None else f'leads {term}'}\n")
    sys.stdout.flush()


async def main(url: str, session: str, scale: str) -> None:
    store = await open_store(url)
    intervals = Intervals().scaled(float(scale))
    await Manager(store, session=session, intervals=intervals, on_change=tell).run()


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    asyncio.run(main(*sys.argv[1:]))
