"""What wake-ups send through a server, observed from outside, and conditions that listening tests wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

from fairlane.store.redis.wakeups import SENDER
from fairlane.store.shared.subscriptions import TopicSubscription
from fairlane.store.shared.topics import Channels


class Tap:
    """Records the messages on the two channels, ``jobs`` and ``others``, and can send any message."""

    def __init__(self, channels: Channels, publish: Callable[[str, str], Awaitable[object]]) -> None:
        self._channels = channels
        self._publish = publish
        self.messages: list[tuple[str, list[str]]] = []
        """Channel and lines of each message: topics, or a sign."""
        self.marks: list[str] = []
        """The first lines of messages that name their sender, if there are any."""
        self._news = asyncio.Event()

    @property
    def received(self) -> list[tuple[str, str]]:
        """Channel and topic, or sign, of each."""
        return [(channel, line) for channel, lines in self.messages for line in lines]

    def receive(self, channel: str, payload: str) -> None:
        """Take in a message."""
        lines = payload.split("\n")
        if lines[0].startswith(SENDER):
            self.marks.append(lines.pop(0))
        self.messages.append(("jobs" if channel == self._channels.jobs else "others", lines))
        self._news.set()

    def forget(self) -> None:
        """Forget what was received so far."""
        self.messages.clear()
        self.marks.clear()

    async def send(self, channel: str, payload: str) -> None:
        """Send a payload as it is."""
        await self._publish(self._channels._asdict()[channel], payload)

    async def until(self, channel: str, line: str, timeout: float = 30.0) -> None:
        """Wait until a line was received."""
        async with asyncio.timeout(timeout):
            while (channel, line) not in self.received:
                self._news.clear()
                await self._news.wait()


def threads() -> list[str]:
    """The threads of all wake-ups that are open."""
    return [thread.name for thread in threading.enumerate() if thread.name == "fairlane-wakeups"]


async def until(subscription: TopicSubscription, *topics: str) -> frozenset[str]:
    """Wait until all `topics` were received. Returns all that were."""
    received: frozenset[str] = frozenset()
    while not received.issuperset(topics):
        news = await subscription.wait(10)
        assert news, f"waited in vain for {set(topics) - received}"
        received |= news
    return received


async def listened_to(subscription: TopicSubscription) -> None:
    """Wait until the server listens for a subscription, and take the topics that were delivered until then."""
    assert subscription._notifier is not None
    async with asyncio.timeout(10):
        while subscription.late or not subscription._notifier.listens(
            jobs=subscription.jobs, others=subscription.others
        ):
            await asyncio.sleep(0.01)
    await subscription.wait(0.0)
