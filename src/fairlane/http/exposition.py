"""Prometheus metrics of a service. Requires the extra ``fairlane[prometheus]``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import prometheus_client

from ..errors import FairlaneError
from ..integrations.prometheus import Metrics
from ..model.reading import QueueReading
from ..model.session import Session

if TYPE_CHECKING:
    from .service import Service


class Exposition:
    """Counts the events of this process, and reads the store at each scrape."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._queues: list[QueueReading] = []
        self._sessions: list[Session] = []
        self._counters: dict[str, int] = {}
        self._up = True
        self._render = prometheus_client.generate_latest
        self._registry = prometheus_client.CollectorRegistry()
        self._metrics = Metrics(
            service.app.events,
            self._registry,
            queues=self._read,
            sessions=lambda: self._sessions,
            counters=self._server,
        )

    def _read(self) -> list[QueueReading]:
        if not self._up:
            raise ConnectionError
        return self._queues

    def _server(self) -> dict[str, int]:
        return self._counters

    async def text(self) -> bytes:
        """The metrics in the text format of Prometheus."""
        client = self._service.app.client
        try:
            self._queues = await self._service.timed(client.queues())
            self._sessions = await self._service.timed(client.sessions())
            self._counters = await self._service.timed(client.counters())
            self._up = True
        except (FairlaneError, TimeoutError):
            self._up = False
        return self._render(self._registry)
