"""Another process that holds the lock which the writers of a database take."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HOLD = """
import fcntl, sys
file = open(sys.argv[1], "a")
fcntl.lockf(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


@contextmanager
def lock_held_elsewhere(database: Path) -> Iterator[int]:
    """Hold the lock in another process. Yields its id."""
    command = [sys.executable, "-c", HOLD, f"{database}-lock"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "locked\n"
            yield holder.pid
        finally:
            holder.kill()
