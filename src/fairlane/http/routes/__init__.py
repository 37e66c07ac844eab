"""The operations of the service, by subject."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ..operation import Operation
from . import batches, bulk, health, insight, jobs, live, pages, queues, session, system

if TYPE_CHECKING:
    from ..service import Service

AT_THE_ROOT = ("/", "/assets/{file}", "/healthz", "/readyz", "/metrics")


def operations_of(service: Service) -> list[Operation]:
    """Every operation with its full path."""
    parts = [jobs, batches, bulk, queues, live, system, insight, session, health]
    subjects = [each.operations for each in (*parts, *([pages] if service.settings.dashboard else []))]
    return [
        operation
        if operation.path in AT_THE_ROOT
        else msgspec.structs.replace(operation, path=service.prefix + operation.path)
        for subject in subjects
        for operation in subject.all
    ]
