"""Another process with wake-ups of its own, for whatever store the URL names.

``python -m tests.store.wakeup_process ROLE URL NAME`` plays one role in the schema or the namespace NAME, or beside
the database NAME, and fails if anything is not as it should be.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fairlane.store.shared import notifier
from fairlane.store.shared.subscriptions import NotifiedWakeups, TopicSubscription
from fairlane.store.sqlite.wakeups import DatagramWakeups
from fairlane.store.wakeups import Subscription

Wakeups = NotifiedWakeups[Any]
AnyWakeups = Wakeups | DatagramWakeups
SQLITE = "sqlite:"
PATIENCE = 30.0
kept: list[AnyWakeups] = []
"""Wake-ups that nothing but the end of the process ends."""


def wakeups_at(url: str, name: str) -> Wakeups:
    """The wake-ups of a schema or, as its keys begin, of a namespace."""
    if url.startswith("redis:"):
        from fairlane.store.redis.address import parse
        from fairlane.store.redis.wakeups import RedisWakeups, connector

        return RedisWakeups(connector(parse(url)), name)
    from fairlane.store.postgresql.wakeups import NotifyWakeups

    return NotifyWakeups(url, name)


@contextmanager
def running(role: str, url: str, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that plays a role; killed at the end if it has not ended by itself."""
    process = subprocess.Popen([sys.executable, "-W", "error", "-m", "tests.store.wakeup_process", role, url, name])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def echoed(wakeups: AnyWakeups, times: int, url: str, name: str) -> list[float]:
    """The milliseconds until another process receives what is published here, shortest first."""
    subscription = wakeups.subscribe(["job:*", "session:ready"])
    spans = []
    with running("echo", url, name) as other:
        assert await subscription.wait(30) == {"session:ready"}
        for number in range(times):
            sent = time.monotonic_ns()
            wakeups.publish([f"queue:{number}"])
            [answer] = await subscription.wait(10)
            again, _, received = answer.removeprefix("job:").partition("/")
            assert int(again) == number
            spans.append((int(received) - sent) / 1e6)
        wakeups.publish(["leader"])
        assert await asyncio.to_thread(other.wait, 10) == 0
    return sorted(spans)


async def echo(wakeups: AnyWakeups) -> None:
    """Answer a topic queue:N by job:N/T, where T is the time of receipt on the clock that all processes share."""
    subscription = wakeups.subscribe(["queue:*", "leader"])
    wakeups.publish(["session:ready"])
    while "leader" not in (received := await subscription.wait(30)):
        now = time.monotonic_ns()
        wakeups.publish(f"job:{topic[6:]}/{now}" for topic in received)
    wakeups.close()


def locks_of(wakeups: AnyWakeups, subscription: Subscription) -> Sequence[AbstractContextManager[object]]:
    """All that a thread could hold while another forks."""
    if isinstance(wakeups, DatagramWakeups):
        return [wakeups._lock.get()]
    assert isinstance(subscription, TopicSubscription)
    return [wakeups._notifier._lock, wakeups._subscriptions._lock, subscription._lock]


async def fork(wakeups: AnyWakeups) -> None:
    """Fork while another thread holds every lock. The child publishes, and the parent receives it and continues."""
    subscription = wakeups.subscribe(["queue:*"])
    wakeups.publish(["queue:before"])
    assert await subscription.wait(10) == {"queue:before"}
    held, forked = threading.Event(), threading.Event()

    def publish_slowly() -> None:
        with ExitStack() as locks:
            for lock in locks_of(wakeups, subscription):
                locks.enter_context(lock)
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
        subscription.close()
        wakeups.close()
        assert threading.active_count() == 1
        os._exit(0)
    forked.set()
    publisher.join()
    assert os.waitstatus_to_exitcode((await asyncio.to_thread(os.waitpid, child, 0))[1]) == 0
    assert await subscription.wait(10) == {"queue:child"}
    wakeups.publish(["queue:after"])
    assert await subscription.wait(10) == {"queue:after"}
    wakeups.close()


def leave(wakeups: AnyWakeups) -> None:
    """Publish as the last act, without an event loop, and do not close anything."""
    kept.append(wakeups)
    wakeups.publish(["queue:last", "job:last"])


def be_patient(url: str) -> None:
    """Wait long before topics are dropped: a busy machine may stand still for seconds, and nothing polls here."""
    notifier.CLOSE_SECONDS = PATIENCE
    if url.startswith("postgresql:"):
        from fairlane.store.postgresql import notifier as postgresql_notifier

        postgresql_notifier.GRACE_SECONDS = PATIENCE


ROLES: dict[str, Callable[[AnyWakeups], Coroutine[Any, Any, None] | None]] = {
    "echo": echo,
    "fork": fork,
    "leave": leave,
}


if __name__ == "__main__":
    role, url, name = sys.argv[1:]
    be_patient(url)
    playing = ROLES[role](DatagramWakeups(Path(name)) if url == SQLITE else wakeups_at(url, name))
    if playing is not None:
        asyncio.run(playing)
