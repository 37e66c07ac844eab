"""Wake-ups between processes that share a namespace, by SUBSCRIBE and PUBLISH.

Two channels for each namespace: one for ``job:`` and ``place:`` topics, which are many, and one for all the others. The
functions publish there too (`step.flush`); what is promised stands in `ears.py`.
"""

from __future__ import annotations

import os
from functools import partial

from ..shared.subscriptions import NotifiedWakeups
from ..shared.topics import Channels
from .notifier import Notifier
from .pubsub import Dial


class RedisWakeups(NotifiedWakeups[Notifier]):
    """The `Wakeups` of one namespace. `dial` must not hold the store: what is forgotten would never be collected."""

    def __init__(self, dial: Dial, prefix: str) -> None:
        channels = Channels(jobs=f"{prefix}jobs", others=f"{prefix}topics")
        super().__init__(partial(Notifier, dial, channels))

    def show(self, channel: str) -> bool:
        """Let the server see on a channel that this process is there; whether it does yet."""
        if self._closed or self._pid != os.getpid():
            return False
        self._notifier.show(channel)
        return self._notifier.is_shown(channel)

    def hide(self, channel: str) -> None:
        """It need not see that any more."""
        self._notifier.hide(channel)
