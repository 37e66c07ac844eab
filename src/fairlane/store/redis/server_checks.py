"""Checks a server before a store is opened there, and describes what its persistence settings can lose.

Rejected are servers that cannot work or would lose jobs silently: one that is too old, a replica, and one that evicts
keys when its memory is full. What a crash can lose is logged, once for each server. Managed services and ACLs hide
settings: those that cannot be read are not judged.
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
KEEP = "set appendonly yes with appendfsync everysec, or always if the last second may not be lost either"
KEEP_LAST_SECOND = "set appendfsync always"
KEEP_IN_REWRITES = "set no-appendfsync-on-rewrite no"
CONSEQUENCE = "Lost writes include new jobs, and the results of finished ones, which may run again"

_logged: set[str] = set()
"""The servers whose persistence this process has logged, by `run_id`."""


class Persistence(NamedTuple):
    """What is lost when the server crashes."""

    level: Level
    summary: str
    lossless: bool = False
    advice: str = KEEP
    """How to lose less."""


async def check(connections: Connections) -> None:
    """Raise `StoreError` for a server that cannot be used, and log what its persistence can lose."""
    info = await information(connections)
    refuse(info, connections.address)
    run = info.get("run_id", str(connections.address))
    if run in _logged:
        return
    found = persistence(info, await settings(connections))
    if run in _logged:
        # Another event loop was first.
        return
    _logged.add(run)
    if found is not None and not found.lossless:
        logger.log(
            logging.WARNING if found.level is Level.WARN else logging.INFO,
            "%s: %s. %s. To change it, %s",
            connections.address,
            found.summary,
            CONSEQUENCE,
            found.advice,
        )


async def information(connections: Connections) -> dict[str, str]:
    """The fields of INFO; empty if this user may not call it."""
    # Without sections: servers that are too old reject several of them, and must be reported as too old.
    answer = await asked(connections, "INFO")
    lines = () if answer is None else answer.decode(errors="replace").splitlines()
    return {name: value for name, colon, value in (line.partition(":") for line in lines) if colon}


async def settings(connections: Connections) -> dict[str, str]:
    """The settings that INFO does not contain; empty if this user may not read them."""
    answer = [part.decode(errors="replace") for part in await asked(connections, "CONFIG", "GET", *SETTINGS) or ()]
    return dict(zip(answer[::2], answer[1::2], strict=True))


async def asked(connections: Connections, *command: str | int) -> Any:
    """The reply to a command; None if this user may not call it, or the server does not have it."""
    try:
        return await connections.call(*command)
    except (NotAllowed, ServerError):
        return None


def refuse(info: Mapping[str, str], address: Address) -> None:
    """Raise an error for a server on which jobs would be lost or nothing would work."""
    name, version = version_of(info)
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and (int(found[1]), int(found[2])) < LEAST[name]:
        raise StoreError(f"{address} is {name} {version}. {NEEDED}.")
    if info.get("role") == "slave":
        # Possibly for a moment only, during a failover.
        master = f"{info.get('master_host')}:{info.get('master_port')}"
        raise StoreUnavailable(
            f"{address} is a replica of {master} and read-only. Name the master in the URL, or its sentinels "
            "as redis+sentinel://host:26379/service. Repeating the call is safe."
        )
    policy = info.get("maxmemory_policy")
    if policy is not None and evicts(policy):
        raise StoreError(
            f"{address} has maxmemory-policy {policy}: it would evict jobs when its memory is full. Set it to "
            "noeviction, and use another server for caches that need eviction."
        )


def version_of(info: Mapping[str, str]) -> tuple[str, str]:
    """The product and its version."""
    # Valkey reports a redis_version too, which never changes.
    if "valkey_version" in info:
        return "Valkey", info["valkey_version"]
    return "Redis", info.get("redis_version", "")


def evicts(policy: str) -> bool:
    """Whether a full server evicts our keys. The `volatile` policies evict only keys that expire, and ours never do."""
    return policy != "noeviction" and not policy.startswith("volatile-")


def persistence(info: Mapping[str, str], config: Mapping[str, str]) -> Persistence | None:
    """What is lost when the server crashes; None if it is unknown."""
    if info.get("aof_enabled") == "1":
        return _by_log(config.get("appendfsync"), config.get("no-appendfsync-on-rewrite") == "yes")
    if "aof_enabled" not in info:
        return None
    save = config.get("save")
    if save == "":
        return Persistence(Level.WARN, "neither appendonly nor save is set: a restart loses everything")
    if save is None:
        lost = "appendonly is off: a crash loses everything since the last snapshot, if any is made"
    else:
        lost = f"there are only snapshots (save {save}): a crash loses everything since the last one"
    changes = info.get("rdb_changes_since_last_save", "0")
    return Persistence(Level.WARN, f"{lost}, currently {changes} changes")


def _by_log(fsync: str | None, lax: bool) -> Persistence:
    """With appendonly, the loss depends on when the log is written to disk."""
    if fsync == "no":
        return Persistence(
            Level.WARN,
            "appendonly is on with appendfsync no: a crash of its machine loses what the system had not written yet, "
            "usually half a minute",
        )
    if fsync is None:
        lost = "appendonly is on: a crash of its machine loses about the last second, unless appendfsync is always"
        return Persistence(Level.OK, lost, advice=KEEP_LAST_SECOND)
    always = fsync == "always"
    lost = "no acknowledged write" if always else "about the last second"
    summary = f"appendonly is on with appendfsync {fsync}: a crash of its machine loses {lost}"
    if lax:
        return Persistence(
            Level.WARN,
            f"{summary}; up to half a minute while the log is rewritten (no-appendfsync-on-rewrite yes)",
            advice=KEEP_IN_REWRITES,
        )
    return Persistence(Level.OK, summary, lossless=always, advice=KEEP_LAST_SECOND)
