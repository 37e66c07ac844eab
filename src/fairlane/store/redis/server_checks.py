"""What a server must be like before a store is opened there, and what its settings can lose.

Refused is what cannot work or would lose jobs in silence: a server that is too old, a replica, and one that removes
keys when its memory is full. What a crash can lose is told in the log, once for each server. Managed services and ACLs
hide settings: what cannot be seen is not judged.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...errors import StoreError, StoreUnavailable
from ..diagnosis import Level
from .address import Address
from .connection_pool import Connections
from .driver_errors import NotAllowed, ServerError

logger = logging.getLogger("fairlane.store")

NEEDED = "Fairlane needs Redis 7.0 or Valkey 7.2, or newer"
LEAST = {"Redis": (7, 0), "Valkey": (7, 2)}
SETTINGS = ("save", "appendfsync", "no-appendfsync-on-rewrite")
KEEP = "set appendonly yes with appendfsync everysec; always, if not even the last second may be lost"
CONSEQUENCE = "With it go jobs that were sent, and the ends of jobs, which then may run again"

_told: set[str] = set()
"""The servers of which this process has told what they can lose, by the ids of their runs."""


class Persistence(NamedTuple):
    """What is lost when the server dies."""

    level: Level
    words: str
    lossless: bool = False


async def check(connections: Connections) -> None:
    """Raise `StoreError` for a server that cannot be used, and tell what its persistence can lose."""
    info = await information(connections)
    refuse(info, connections.address)
    run = info.get("run_id", str(connections.address))
    if run in _told:
        return
    found = persistence(info, await settings(connections))
    if run in _told:
        # Another event loop was quicker.
        return
    _told.add(run)
    if found is not None and not found.lossless:
        logger.log(
            logging.WARNING if found.level is Level.WARN else logging.INFO,
            "%s: %s. %s. To change it, %s",
            connections.address,
            found.words,
            CONSEQUENCE,
            KEEP,
        )


async def information(connections: Connections) -> dict[str, str]:
    """What INFO tells; nothing if this user may not ask."""
    # Without sections: servers that are too old do not take several of them, and should be told that they are.
    answer = await asked(connections, "INFO")
    lines = () if answer is None else answer.decode(errors="replace").splitlines()
    return {name: value for name, colon, value in (line.partition(":") for line in lines) if colon}


async def settings(connections: Connections) -> dict[str, str]:
    """The settings that INFO does not tell; nothing if this user may not see them."""
    answer = [part.decode(errors="replace") for part in await asked(connections, "CONFIG", "GET", *SETTINGS) or ()]
    return dict(zip(answer[::2], answer[1::2], strict=True))


async def asked(connections: Connections, *command: str | int) -> Any:
    """What the server answers; None if this user may not ask, or the command is not there for anybody."""
    try:
        return await connections.call(*command)
    except (NotAllowed, ServerError):
        return None


def refuse(info: Mapping[str, str], address: Address) -> None:
    """Raise an error for a server on which jobs would be lost, or nothing would work."""
    name, version = version_of(info)
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and (int(found[1]), int(found[2])) < LEAST[name]:
        raise StoreError(f"{address} is {name} {version}. {NEEDED}.")
    if info.get("role") == "slave":
        # It may be one for a moment only, in the middle of a failover.
        master = f"{info.get('master_host')}:{info.get('master_port')}"
        raise StoreUnavailable(
            f"{address} is a replica of {master}, and may not be written. Name the master in the URL, or its sentinels "
            "as redis+sentinel://host:26379/service. Repeating the call is safe."
        )
    policy = info.get("maxmemory_policy")
    if policy is not None and evicts(policy):
        raise StoreError(
            f"{address} has the maxmemory-policy {policy}: when its memory is full, it would remove jobs. Set it to "
            "noeviction, and keep caches that need another one on another server."
        )


def version_of(info: Mapping[str, str]) -> tuple[str, str]:
    """What the server is, and its version."""
    # Valkey tells a version of Redis too, which is always the same.
    if "valkey_version" in info:
        return "Valkey", info["valkey_version"]
    return "Redis", info.get("redis_version", "")


def evicts(policy: str) -> bool:
    """Whether a full server removes keys of ours. The `volatile` policies take keys that expire, and ours never do."""
    return policy != "noeviction" and not policy.startswith("volatile-")


def persistence(info: Mapping[str, str], config: Mapping[str, str]) -> Persistence | None:
    """What is lost when the server dies; None if it cannot be told."""
    if info.get("aof_enabled") == "1":
        return _by_log(config.get("appendfsync"), config.get("no-appendfsync-on-rewrite") == "yes")
    if "aof_enabled" not in info:
        return None
    save = config.get("save")
    if save == "":
        return Persistence(Level.WARN, "it has neither appendonly nor save: a restart loses everything")
    if save is None:
        lost = "appendonly is off: what came after the last snapshot is lost when it dies, and all where none is made"
    else:
        lost = f"it makes snapshots alone (save {save}): what came after the last one is lost when it dies"
    changes = info.get("rdb_changes_since_last_save", "0")
    return Persistence(Level.WARN, f"{lost}, at this moment {changes} changes")


def _by_log(fsync: str | None, lax: bool) -> Persistence:
    """With a log of all writes it depends on when that is on the disk."""
    if fsync == "no":
        return Persistence(
            Level.WARN,
            "it has appendonly with appendfsync no: when its machine dies, all that the system had not written yet is "
            "lost, usually half a minute",
        )
    if fsync is None:
        lost = "it has appendonly: when its machine dies, about the last second is lost, unless appendfsync is always"
        return Persistence(Level.OK, lost)
    always = fsync == "always"
    lost = "nothing that was acknowledged is lost" if always else "about the last second is lost"
    words = f"it has appendonly with appendfsync {fsync}: when its machine dies, {lost}"
    if lax:
        return Persistence(
            Level.WARN, f"{words}; but up to half a minute while the log is rewritten (no-appendfsync-on-rewrite yes)"
        )
    return Persistence(Level.OK, words, lossless=always)
