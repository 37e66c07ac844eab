"""The operations of the service, by subject."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ..operation import Operation
from . import batches, bulk, health, jobs, queues, system

if TYPE_CHECKING:
    from ..service import Service

AT_THE_ROOT = ("/healthz", "/readyz", "/metrics")


def operations_of(service: Service) -> list[Operation]:
    """Every operation with its full path."""
    subjects = [each.operations for each in (jobs, batches, bulk, queues, system, health)]
    return [
        operation
        if operation.path in AT_THE_ROOT
        else msgspec.structs.replace(operation, path=service.prefix + operation.path)
        for subject in subjects
        for operation in subject.all
    ]
