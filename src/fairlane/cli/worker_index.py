"""Which index a worker asks for when its host has a number of its own, as in a StatefulSet.

A named index that comes back on the same host takes over from whoever held it, which is right after a crash and wrong
while the other one lives. So a living process of this host is left its index, and of several that start at once only
one gets it: the lock on a small file is held until the process ends, however that happens.
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
from ..worker.worker_session import runs
from .context import Target

if TYPE_CHECKING:
    from ..worker.settings import WorkerSettings

NUMBERED_HOST = re.compile(r"-(\d{1,4})$")
"""How a StatefulSet and many fleets name their hosts; a longer number is a hash or a date."""


async def choose_index(target: Target, settings: WorkerSettings, wish: str, number: int = 0) -> int | None:
    """The index that the host's name gives to process `number` of it; None leaves the choice to the store."""
    found = NUMBERED_HOST.search(settings.host)
    if found is None:
        if wish == "host":
            raise InvalidInput("--index", f"the host name {settings.host!r} does not end in a dash and up to 4 digits")
        return None
    index = int(found[1]) + number
    if wish == "host":
        return index
    for session in await target.app.client.sessions():
        if session.kind is SessionKind.WORKER and (session.pool, session.index) == (settings.pool, index):
            there = session.state in (SessionState.LIVE, SessionState.STOPPING)
            if there and (session.host != settings.host or runs(session.pid)):
                return None
    return index if _take(f"{Path.cwd()} {target.url} {settings.pool} {index}") else None


def _take(what: str) -> bool:
    """Take something that only one process of this machine may have, until it ends."""
    name = f"fairlane-{os.getuid()}-{hashlib.sha256(what.encode()).hexdigest()[:24]}.lock"
    if name in _taken:
        return False
    # Never closed: the system lets go of the lock when the process ends.
    lock = os.open(Path(tempfile.gettempdir()) / name, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    try:
        # Not flock: that would live on in the children of a worker that was killed.
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return False
    _taken.add(name)
    return True


_taken: set[str] = set()
"""What this process has: the system does not tell its own callers apart."""
