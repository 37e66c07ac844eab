"""A process that takes a turn, reports it, and holds it until it is killed."""

import asyncio
import sys

from msgspec.structs import replace

from fairlane import Fairlane, Intervals, Settings


async def hold(url: str, lease: float) -> None:
    """Hold the lane for ever."""
    app = Fairlane(settings=Settings(url=url, intervals=replace(Intervals().scaled(0.1), lease=lease)))
    app.queue("models").lane("flux", limit=1)
    async with app.turn("flux", queue="models") as turn:
        sys.stdout.write(f"{turn.id} {turn.fence}\n")
        sys.stdout.flush()
        await asyncio.sleep(3_600)


if __name__ == "__main__":
    asyncio.run(hold(sys.argv[1], float(sys.argv[2])))
