"""What wake-ups send through a server, seen from outside, and what tests wait for when they listen themselves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

from fairlane.store.redis.wakeups import SENDER
from fairlane.store.shared.subscriptions import TopicSubscription
from fairlane.store.shared.topics import Channels


class Tap:
    """Hears what really travels on the two channels, ``jobs`` and ``others``, and may send anything."""

    def __init__(self, channels: Channels, publish: Callable[[str, str], Awaitable[object]]) -> None:
        self._channels = channels
        self._publish = publish
        self.messages: list[tuple[str, list[str]]] = []
        """Channel and lines of each message: topics, or a sign."""
        self.marks: list[str] = []
        """The lines in front of them that say who has sent them, where there are any."""
        self._news = asyncio.Event()

    @property
    def heard(self) -> list[tuple[str, str]]:
        """Channel and topic, or sign."""
        return [(channel, line) for channel, lines in self.messages for line in lines]

    def hear(self, channel: str, payload: str) -> None:
        """Take in a message."""
        lines = payload.split("\n")
        if lines[0].startswith(SENDER):
            self.marks.append(lines.pop(0))
        self.messages.append(("jobs" if channel == self._channels.jobs else "others", lines))
        self._news.set()

    def forget(self) -> None:
        """Forget what was heard so far."""
        self.messages.clear()
        self.marks.clear()

    async def send(self, channel: str, payload: str) -> None:
        """Send a payload as it is."""
        await self._publish(self._channels._asdict()[channel], payload)

    async def until(self, channel: str, line: str, timeout: float = 5.0) -> None:
        """Wait until a line was heard."""
        async with asyncio.timeout(timeout):
            while (channel, line) not in self.heard:
                self._news.clear()
                await self._news.wait()


def threads() -> list[str]:
    """The threads of all wake-ups that are open."""
    return [thread.name for thread in threading.enumerate() if thread.name == "fairlane-wakeups"]


async def until(ear: TopicSubscription, *topics: str) -> frozenset[str]:
    """Wait until all `topics` were heard, and tell everything that was."""
    heard: frozenset[str] = frozenset()
    while not heard.issuperset(topics):
        news = await ear.wait(5)
        assert news, f"waited in vain for {set(topics) - heard}"
        heard |= news
    return heard


async def listened_to(ear: TopicSubscription) -> None:
    """Wait until the server listens for an ear, and take what it was told because that took long."""
    assert ear._notifier is not None
    async with asyncio.timeout(10):
        while ear.late or not ear._notifier.listens(jobs=ear.jobs, others=ear.others):
            await asyncio.sleep(0.01)
    await ear.wait(0.0)
