"""The loads of a Celery load balancer, for the dashboard and for programs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from .. import view_shapes
from ..access import Scope
from ..answers import Answer, json_answer
from ..operation import Exchange, Operations


def load_operations(loads: Callable[[], Mapping[str, Any]]) -> Operations:
    """The loads that a balancer reports: ``create_app(app, extra=[load_operations(balancer.loads)])``."""
    operations = Operations("celery")
    example = {"queues": {"queue_0": {"pending": 3, "running": 1}}}

    @operations.add("GET", "/api/v1/celery", Scope.READ, answer=view_shapes.Loads, shows=example)
    async def celery_loads(exchange: Exchange) -> Answer:
        """List the balanced queues of Celery with their waiting and running tasks."""
        found = await asyncio.to_thread(loads)
        return json_answer({"queues": {name: msgspec.to_builtins(load) for name, load in found.items()}})

    return operations
