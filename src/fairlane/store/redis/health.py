"""What `fairlane doctor` reports about a server: version, memory, persistence, replication, losses and slow calls."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..diagnosis import Finding, Level
from . import server_checks
from .connection_pool import Connections
from .encoding import decode

FILLING = 0.80
NEARLY_FULL = 0.95
LATE_SECONDS = 10
"""Replicas report every second. One that is this late is stopped or disconnected."""
RECENT_SECONDS = 3_600
DAY_SECONDS = 86_400
LOOKED_AT = 128
"""Entries of the slow log that are read: its default length."""
RECOUNT = "run fairlane doctor --recount to check what is left"


async def findings(connections: Connections) -> list[Finding]:
    """All findings that this user has the rights to see."""
    info = await server_checks.information(connections)
    if not info:
        what = "this user may not call INFO"
        return [Finding(Level.WARN, "server", what, "grant +info with ACL SETUSER")]
    config = await server_checks.settings(connections)
    prefix, now = connections.address.prefix, int(info.get("server_time_usec", 0)) / 1e6
    found = [_server(info), _eviction(info), _memory(info), *_persistence(info, config), _replication(info)]
    lost = await server_checks.asked(connections, "LRANGE", f"{prefix}lost", 0, -1)
    if lost is not None:
        found.append(_data_loss([decode(each) for each in lost], now))
    slow = await server_checks.asked(connections, "SLOWLOG", "GET", LOOKED_AT)
    if slow is not None:
        found.append(_slow(slow, prefix, now))
    return [finding for finding in found if finding is not None]


def _server(info: Mapping[str, str]) -> Finding:
    version = " ".join(filter(None, server_checks.version_of(info)))
    if info.get("cluster_enabled") == "1":
        version += ", a node of a cluster"
    if info.get("role") == "slave":
        # It became one while the store was open.
        return Finding(
            Level.ERROR, "server", f"{version}, now a replica", "name the master, or its sentinels, in the URL"
        )
    return Finding(Level.OK, "server", version)


def _eviction(info: Mapping[str, str]) -> Finding | None:
    policy, evicted = info.get("maxmemory_policy"), int(info.get("evicted_keys", 0))
    if policy is None:
        return None
    if server_checks.evicts(policy):
        what = f"maxmemory-policy is {policy}, and {evicted:,} keys were evicted: jobs may be among them"
        return Finding(Level.ERROR, "eviction", what, f"set it to noeviction at once; {RECOUNT}")
    if policy != "noeviction":
        what = f"maxmemory-policy is {policy}, which evicts only keys that expire; Fairlane has none"
        return Finding(Level.OK, "eviction", what)
    if evicted:
        what = f"{evicted:,} keys were evicted since the server started, before maxmemory-policy was noeviction"
        return Finding(Level.WARN, "eviction", what, RECOUNT)
    return Finding(Level.OK, "eviction", "maxmemory-policy is noeviction, and no key was evicted")


def _memory(info: Mapping[str, str]) -> Finding | None:
    used, most = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    whole = int(info.get("total_system_memory", 0))
    limit = most or whole
    if not limit:
        return None
    of = f"maxmemory, {_size(most)}" if most else f"the machine's {_size(whole)}; maxmemory is not set"
    what = f"{_size(used)} used, {used / limit:.0%} of {of}"
    full = "new jobs are rejected" if most else "the system may kill the server"
    advice = f"when it is full, {full}: raise maxmemory, or keep fewer finished jobs (FAIRLANE_RETENTION_…)"
    if used >= NEARLY_FULL * limit:
        return Finding(Level.ERROR, "memory", what, advice)
    if used >= FILLING * limit:
        return Finding(Level.WARN, "memory", what, advice)
    return Finding(Level.OK, "memory", what)


def _persistence(info: Mapping[str, str], config: Mapping[str, str]) -> list[Finding]:
    found = server_checks.persistence(info, config)
    findings = [] if found is None else [Finding(found.level, "persistence", found.summary, _advice(found))]
    advice = "check the server's log: its disk may be full or missing"
    if info.get("aof_last_write_status", "ok") != "ok":
        what = "the last write to the appendonly log failed: all writes are rejected until one succeeds"
        findings.append(Finding(Level.ERROR, "persistence", what, advice))
    if info.get("rdb_last_bgsave_status", "ok") != "ok":
        what = "the last snapshot failed: if save is set, all writes are rejected until one succeeds"
        findings.append(Finding(Level.ERROR, "persistence", what, advice))
    if info.get("aof_last_bgrewrite_status", "ok") != "ok":
        what = "the last rewrite of the appendonly log failed, and the log grows"
        findings.append(Finding(Level.WARN, "persistence", what, advice))
    return findings


def _advice(found: server_checks.Persistence) -> str | None:
    return found.advice if found.level is Level.WARN else None


def _replication(info: Mapping[str, str]) -> Finding | None:
    if info.get("role") != "master":
        return None
    replicas = [
        dict(part.partition("=")[::2] for part in line.split(","))
        for name, line in info.items()
        if re.fullmatch(r"slave\d+", name)
    ]
    behind = [
        f"{each.get('ip')}:{each.get('port')} ({each.get('state')}, last seen {each.get('lag')} s ago)"
        for each in replicas
        if each.get("state") != "online" or int(each.get("lag", 0)) > LATE_SECONDS
    ]
    if behind:
        advice = "a failover would lose what it lacks; check that it runs and is reachable"
        return Finding(Level.WARN, "replication", f"replicas are behind: {', '.join(behind)}", advice)
    if not replicas:
        return Finding(Level.OK, "replication", "a master without replicas")
    missing = max(int(info.get("master_repl_offset", 0)) - int(each.get("offset", 0)) for each in replicas)
    count = f"{len(replicas)} replica{'s' if len(replicas) > 1 else ''}"
    return Finding(Level.OK, "replication", f"a master with {count}, at most {missing:,} bytes behind")


def _data_loss(lost: list[dict[str, Any]], now: float) -> Finding:
    """Losses that processes have reported, newest first: see `data_loss.py`."""
    recent = [each for each in lost if now - each["at"] < DAY_SECONDS]
    if not recent:
        return Finding(Level.OK, "losses", "no data loss was reported within a day")
    minutes = max(0.0, now - recent[0]["at"]) / 60
    times = f", and {len(recent) - 1} more within a day" if len(recent) > 1 else ""
    return Finding(
        Level.ERROR,
        "losses",
        f"{minutes:,.0f} minutes ago {recent[0]['what']}{times}: acknowledged writes may be lost",
        "check its persistence above, and enqueue missing jobs again",
    )


def _slow(entries: list[Any], prefix: str, now: float) -> Finding:
    """Our calls in the slow log: while one runs, the server serves no other client."""
    ours: dict[str, tuple[int, int]] = {}
    for _, moment, microseconds, arguments, *_ in entries:
        command, *rest = arguments
        ours_it_is = command.upper() in (b"FCALL", b"FCALL_RO") and rest[2:3] == [prefix.encode()]
        if ours_it_is and now - moment < RECENT_SECONDS:
            # The name of the library, then that of the verb.
            verb = rest[0].decode(errors="replace").rpartition("_")[2]
            count, longest = ours.get(verb, (0, 0))
            ours[verb] = (count + 1, max(longest, microseconds))
    if not ours:
        return Finding(Level.OK, "slow", "no Fairlane call in the slow log of the last hour")
    calls = ", ".join(
        f"{verb} {count} time{'s' if count > 1 else ''}, up to {longest / 1000:.0f} ms"
        for verb, (count, longest) in sorted(ours.items(), key=lambda each: -each[1][1])
    )
    advice = "while one runs no other client is served; is the machine busy, or a call very large?"
    return Finding(Level.WARN, "slow", f"in the slow log of the last hour: {calls}", advice)


def _size(number: int) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"
