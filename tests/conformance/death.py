"""How sessions die in this suite: they do not renew until their lease is over, and a pass declares them dead."""

from __future__ import annotations

from fairlane.model.maintenance import Rescued

from .kit import Kit, Worker

LONG = 100_000.0
"""The lease of a session that is to outlive the others."""


async def die(kit: Kit, worker: Worker) -> Rescued:
    """Let `worker` be silent until it is declared dead. Sessions that must survive need a longer lease."""
    kit.clock.advance(worker.session.lease + 1)
    rescued = await kit.store.rescue()
    assert worker.id in rescued.declared
    return rescued


async def survivor(kit: Kit, *queues: str, slots: int = 10) -> Worker:
    """A worker that outlives every other session of the test."""
    return await kit.worker(*queues, slots=slots, lease=LONG)
