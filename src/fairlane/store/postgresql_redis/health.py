"""What `fairlane doctor` and the metrics report about the Redis servers: whether they answer, and counts of tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ...errors import FairlaneError
from ..diagnosis import Finding, Level
from ..redis.driver_errors import NotAllowed
from .shard import Shard

COUNTED = ("scanned", "pushed", "failed", "trimmed", "generations")
"""Fields of a server's state that only grow, until the server is flushed."""


async def counters(shards: Sequence[Shard]) -> dict[str, int]:
    """The counts of tokens of all servers that answer, and the number of those that do not."""
    answers = await asyncio.gather(*(_state(shard) for shard in shards))
    found = {f"tokens_{name}": 0 for name in COUNTED}
    for shard, state in zip(shards, answers, strict=True):
        for name in COUNTED:
            found[f"tokens_{name}"] += 0 if isinstance(state, FairlaneError) else int(state.get(name, 0))
        found["tokens_failed"] += shard.lost
    found["redis_down"] = sum(isinstance(state, FairlaneError) for state in answers)
    return found


async def findings(shards: Sequence[Shard]) -> list[Finding]:
    """One finding for each server."""
    answers = await asyncio.gather(*(_state(shard) for shard in shards))
    found = [_finding(shard, state) for shard, state in zip(shards, answers, strict=True)]
    if all(isinstance(state, FairlaneError) for state in answers):
        found.append(
            Finding(
                Level.WARN,
                "tokens",
                "no Redis can be used: this is PostgreSQL alone, and workers poll it",
                "jobs start up to a second later; nothing is lost",
            )
        )
    return found


async def _state(shard: Shard) -> dict[str, str] | FairlaneError:
    """What a server knows about the tokens; the error if it cannot be asked."""
    try:
        answer: Any = await shard.call("HGETALL", shard.keys.state)
        alive: Any = await shard.call("EXISTS", shard.keys.alive)
        refused = await _refused_topics(shard)
    except FairlaneError as exc:
        return exc
    texts = [each.decode(errors="replace") for each in answer]
    return {**dict(zip(texts[::2], texts[1::2], strict=True)), "alive": str(alive), "refused": refused}


async def _refused_topics(shard: Shard) -> str:
    """Why the server rejects topics; empty if it accepts them. No process listens to the channel of the test."""
    try:
        await shard.call("PUBLISH", f"{shard.keys.prefix}doctor", "")
    except NotAllowed as exc:
        return str(exc)
    return ""


def _finding(shard: Shard, state: dict[str, str] | FairlaneError) -> Finding:
    topic = f"tokens of {shard.name}"
    if isinstance(state, FairlaneError):
        polling = f"workers find jobs of {shard.name} priority by polling PostgreSQL"
        what = f"{shard.address} cannot be used ({state}): {polling}"
        return Finding(Level.WARN, topic, what, "start it, or correct its URL; jobs start up to a second later")
    counts = ", ".join(f"{int(state.get(name, 0)):,} {name}" for name in COUNTED[:-1])
    if state["refused"]:
        what = f"workers find sticky jobs, and those for one worker, by polling: {state['refused']}"
        return Finding(Level.WARN, topic, what, f"allow its user the channels: ACL SETUSER … &{shard.keys.prefix}*")
    if state["alive"] == "0":
        what = f"no leader has reconciled them recently ({counts})"
        return Finding(Level.WARN, topic, what, "workers poll meanwhile; see the finding about the leader")
    made = int(state.get("generations", 1)) - 1
    again = f"; the server was rolled back {made} times" if made > 0 else ""
    return Finding(Level.OK, topic, f"{shard.address} answers ({counts}{again})")
