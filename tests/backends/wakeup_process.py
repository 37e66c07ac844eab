"""Another process with wake-ups of its own, for whatever server the URL names.

``python -m tests.backends.wakeup_process ROLE URL NAME`` plays one role in the schema or the namespace NAME, and fails
if anything is not as it should be.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Coroutine
from typing import Any

from fairlane.backends.ears import NotifiedWakeups

Wakeups = NotifiedWakeups[Any]
kept: list[Wakeups] = []
"""Wake-ups that nothing but the end of the process ends."""


def wakeups_at(url: str, name: str) -> Wakeups:
    """The wake-ups of a schema or, as its keys begin, of a namespace."""
    if url.startswith("redis:"):
        from fairlane.backends.redis.address import parse
        from fairlane.backends.redis.pair import dialling
        from fairlane.backends.redis.wakeups import RedisWakeups

        return RedisWakeups(dialling(parse(url)), name)
    from fairlane.backends.postgresql.wakeups import NotifyWakeups

    return NotifyWakeups(url, name)


async def echo(wakeups: Wakeups) -> None:
    """Answer a topic queue:N by job:N/T, T the time of hearing it on the clock that all processes share."""
    ear = wakeups.subscribe(["queue:*", "leader"])
    wakeups.publish(["session:ready"])
    while "leader" not in (heard := await ear.wait(30)):
        now = time.monotonic_ns()
        wakeups.publish(f"job:{topic[6:]}/{now}" for topic in heard)
    wakeups.close()


async def fork(wakeups: Wakeups) -> None:
    """Fork while another thread holds every lock. The child publishes, and the parent hears it and goes on."""
    ear = wakeups.subscribe(["queue:*"])
    wakeups.publish(["queue:before"])
    assert await ear.wait(5) == {"queue:before"}
    held, forked = threading.Event(), threading.Event()

    def publish_slowly() -> None:
        with wakeups._notifier._lock, wakeups._ears._lock, ear._lock:
            held.set()
            forked.wait(30)

    publisher = threading.Thread(target=publish_slowly)
    publisher.start()
    held.wait(30)
    # Newer Pythons warn of a fork beside threads, for the very reason that this is about.
    warnings.simplefilter("ignore", DeprecationWarning)
    child = os.fork()
    if not child:
        wakeups.publish(["queue:child"])
        ear.close()
        wakeups.close()
        assert threading.active_count() == 1
        os._exit(0)
    forked.set()
    publisher.join()
    assert os.waitstatus_to_exitcode((await asyncio.to_thread(os.waitpid, child, 0))[1]) == 0
    assert await ear.wait(5) == {"queue:child"}
    wakeups.publish(["queue:after"])
    assert await ear.wait(5) == {"queue:after"}
    wakeups.close()


def leave(wakeups: Wakeups) -> None:
    """Publish as the last act, without an event loop, and do not close anything."""
    kept.append(wakeups)
    wakeups.publish(["queue:last", "job:last"])


ROLES: dict[str, Callable[[Wakeups], Coroutine[Any, Any, None] | None]] = {"echo": echo, "fork": fork, "leave": leave}


if __name__ == "__main__":
    role, url, name = sys.argv[1:]
    playing = ROLES[role](wakeups_at(url, name))
    if playing is not None:
        asyncio.run(playing)
