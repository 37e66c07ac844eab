"""The audit log: one record for each change that a caller made to the running system, on the logger ``fairlane.audit``.

A record has the action, the caller's token (its id, never its secret), the address, the target and the outcome as
attributes; with the JSON format of `fairlane.runtime.logs` they are fields of the line.
"""

from __future__ import annotations

import logging
from typing import Any

from .operation import Exchange

logger = logging.getLogger("fairlane.audit")


def record(exchange: Exchange, action: str, **target: Any) -> None:
    """Log a change that a caller made."""
    peer = exchange.scope.get("client")
    entry = {
        "action": action,
        "caller": exchange.caller.id,
        "address": None if peer is None else peer[0],
        "target": {name: value for name, value in target.items() if value is not None},
    }
    logger.info("%s by %s: %s", action, exchange.caller.id, entry["target"], extra={"audit": entry})
