"""Wake-ups between processes that share a schema, by LISTEN and NOTIFY.

Two channels for each schema: one for ``job:`` topics, which are many, and one for all the others. They go over a
connection that belongs to the wake-ups alone (`notifier.py`); what is promised stands in `ears.py`.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from ..ears import NotifiedWakeups
from .channels import Channels
from .notifier import Notifier


class NotifyWakeups(NotifiedWakeups[Notifier]):
    """The `Wakeups` of one schema. `listen=False` is for servers behind a pooler that cannot LISTEN."""

    def __init__(self, dsn: str, schema: str, *, listen: bool = True) -> None:
        self.channels = Channels.of(schema)
        super().__init__(partial(Notifier, dsn, self.channels), listen=listen)

    def was_sent(self, topics: Collection[str]) -> None:
        """Topics that a transaction has sent itself: told here too, unless they come back by themselves."""
        if not self._closed and not (self._listen and self._notifier.listens(jobs=False, others=True)):
            self._notice_fork()
            self._ears.tell(topics)
