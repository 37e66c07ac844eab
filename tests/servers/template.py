"""An empty data directory, kept as one file: making one takes up to a second, unpacking it a tenth."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .installation import Account, Installation

SUPERUSER = "tester"
"""Different from the name of the schema: a schema named like the user would be searched first for unqualified names."""
INITDB = ("-U", SUPERUSER, "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync", "--no-instructions")
FORM = 2
"""Incremented when earlier templates must not be used any more."""
CACHE = Path(__file__).resolve().parents[2] / ".pytest_cache" / "d" / "servers"


def template_of(installation: Installation, account: Account) -> Path:
    """The file for a version and a user. It is renamed into place, so it is complete if it exists."""
    return _cache() / f"postgresql-{installation.version}-{account.name}-{FORM}.tar"


@contextlib.contextmanager
def locked(template: Path) -> Iterator[None]:
    """Lock a template: a second process waits for it instead of making another one."""
    with template.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def keep(data: Path, template: Path) -> None:
    """Make a template of a data directory whose server was never started. The caller holds the lock."""
    part = template.with_suffix(".part")
    subprocess.run(["tar", "-cf", part, "-C", data.parent, data.name], check=True, capture_output=True)
    part.rename(template)


def _cache() -> Path:
    with contextlib.suppress(OSError):
        CACHE.mkdir(parents=True, exist_ok=True)
        if os.access(CACHE, os.W_OK):
            return CACHE
    # The sources cannot be written to. A folder that only its owner can have made.
    fallback = Path(tempfile.gettempdir()) / f"fairlane-servers-{os.geteuid()}"
    fallback.mkdir(mode=0o700, exist_ok=True)
    if fallback.stat().st_uid != os.geteuid():
        raise PermissionError(f"{fallback} belongs to another account")
    return fallback
