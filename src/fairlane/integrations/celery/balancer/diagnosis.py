"""Diagnosis of balanced mode: each check returns findings and changes nothing."""

from __future__ import annotations

from typing import Any

from ....errors import StoreUnavailable
from ....store.diagnosis import Finding, Level
from .broker import open_broker
from .leases import LeaseStore, Load
from .publishing import Publisher


def diagnose(app: Any, store: LeaseStore, publisher: Publisher) -> list[Finding]:
    """Run all checks. A server that cannot be reached is the only finding."""
    try:
        loads, served = store.loads()
    except StoreUnavailable as exc:
        advice = "start the server or check the URL; until then tasks are published to the queues in turn"
        return [Finding(Level.ERROR, "server", str(exc), advice)]
    return [
        Finding(Level.OK, "server", f"{store.address} can be reached"),
        _declared(app, publisher),
        _consumers(publisher, loads, served),
        _broker(app, publisher, loads),
    ]


def _declared(app: Any, publisher: Publisher) -> Finding:
    missing = [name for name in publisher.names if name not in app.amqp.queues]
    if missing:
        advice = "create the LoadBalancer where the application is created, before anything replaces app.amqp"
        return Finding(Level.ERROR, "queues", f"not declared: {', '.join(missing)}", advice)
    return Finding(Level.OK, "queues", f"{len(publisher.names)} queues are declared")


def _consumers(publisher: Publisher, loads: list[Load], served: list[int]) -> Finding:
    if not served:
        return Finding(
            Level.WARN,
            "consumers",
            "no live worker consumes a balanced queue, so all queues are eligible",
            "start a worker of this application; if one is running, check that it imports the LoadBalancer",
        )
    idle = [index for index in range(len(publisher.names)) if index not in served]
    stuck = [publisher.names[index] for index in idle if loads[index].pending]
    if stuck:
        advice = "start a worker that consumes them: celery worker -Q " + ",".join(stuck)
        return Finding(Level.ERROR, "consumers", f"messages wait without a consumer in {', '.join(stuck)}", advice)
    if idle:
        names = ", ".join(publisher.names[index] for index in idle)
        return Finding(Level.WARN, "consumers", f"no live worker consumes {names}; these get no tasks")
    return Finding(Level.OK, "consumers", "every queue has a live consumer")


def _broker(app: Any, publisher: Publisher, loads: list[Load]) -> Finding:
    try:
        broker = open_broker(app)
        try:
            sizes = broker.sizes(publisher.names)
        finally:
            broker.close()
    except Exception as exc:
        # Only the class: the text may contain the URL of the broker with its password.
        return Finding(Level.ERROR, "broker", f"cannot be read ({type(exc).__name__})", "check broker_url")
    # Workers hold messages that still count as pending, so more leases than messages are normal.
    low = [name for name, size, load in zip(publisher.names, sizes, loads, strict=True) if size > load.pending]
    if low:
        advice = (
            "revoked and expired tasks are not counted, and stay in the broker until their turn; anything else is "
            "corrected by a worker within some heartbeats, or at once by `fairlane celery reset`"
        )
        return Finding(
            Level.WARN, "counts", f"the broker has more messages than are counted in {', '.join(low)}", advice
        )
    waiting = sum(load.pending for load in loads)
    return Finding(Level.OK, "counts", f"{waiting} waiting, {sum(load.running for load in loads)} running")
