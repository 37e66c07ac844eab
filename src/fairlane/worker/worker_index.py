"""Chooses the index of a worker on a numbered host, as in a StatefulSet.

A worker that registers with an explicit index takes it over from the previous session of its host. This is right after
a crash and wrong while the other process is alive. A live process of this host therefore keeps its index, and of
several that start at once only one gets it: it holds a lock on a small file until it exits.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InvalidInput
from ..model.session import SessionKind, SessionState
from .settings import WorkerSettings
from .worker_session import runs

if TYPE_CHECKING:
    from ..client import Client

NUMBERED_HOST = re.compile(r"-(\d{1,4})$")
"""The host names of a StatefulSet and of many fleets. A longer number is a hash or a date."""


async def choose_index(
    client: Client, url: str, settings: WorkerSettings, requested: str, number: int = 0
) -> int | None:
    """The index of process `number` by the host name; None leaves the choice to the store."""
    found = NUMBERED_HOST.search(settings.host)
    if found is None:
        if requested == "host":
            raise InvalidInput("--index", f"the host name {settings.host!r} does not end in a dash and up to 4 digits")
        return None
    index = int(found[1]) + number
    if requested == "host":
        return index
    for session in await client.sessions():
        if session.kind is SessionKind.WORKER and (session.pool, session.index) == (settings.pool, index):
            there = session.state in (SessionState.LIVE, SessionState.STOPPING)
            if there and (session.host != settings.host or runs(session.pid)):
                return None
    return index if _try_lock(f"{Path.cwd()} {url} {settings.pool} {index}") else None


def _try_lock(what: str) -> bool:
    """Take a lock that one process of this machine holds until it exits."""
    name = f"fairlane-{os.getuid()}-{hashlib.sha256(what.encode()).hexdigest()[:24]}.lock"
    if name in _held_locks:
        return False
    # Never closed: the kernel releases the lock when the process exits.
    lock = os.open(Path(tempfile.gettempdir()) / name, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    try:
        # Not flock: the children of a killed worker would keep that lock.
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return False
    _held_locks.add(name)
    return True


_held_locks: set[str] = set()
"""The locks of this process. The kernel grants a lock again to the process that holds it."""
