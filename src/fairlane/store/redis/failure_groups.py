"""Failed jobs by task and error group, out of the newest.

They are looked at some hundred at a time, so that the server does not stand still for others meanwhile.
"""

from __future__ import annotations

from typing import Any

from ...model import listings
from ...model.listings import ERROR_TAIL, FailureGroup, largest_first
from .functions import Functions

AT_ONCE = 500


async def failures(functions: Functions, queue: str | None, task: str | None, limit: int) -> list[FailureGroup]:
    """The largest groups."""
    most, looked_at = listings.MOST_FAILURES, 0
    found: dict[tuple[str, str], list[Any]] = {}
    while True:
        # One more than counts, to know whether there are more.
        asked = min(AT_ONCE, most - looked_at) or 1
        answer = await functions.call("failures", queue or "", task or "", looked_at, asked, ERROR_TAIL)
        if looked_at == most:
            exact = not answer["looked_at"]
            break
        for row in answer["groups"]:
            _add(found, row)
        looked_at += answer["looked_at"]
        if answer["looked_at"] < asked:
            exact = True
            break
    return largest_first((FailureGroup.of(row, exact=exact) for row in found.values()), limit)


def _add(found: dict[tuple[str, str], list[Any]], row: list[Any]) -> None:
    known = found.setdefault((row[0], row[1]), row)
    if known is row:
        return
    known[2] += row[2]
    known[3] = min(known[3], row[3])
    if row[4] > known[4]:
        known[4:] = row[4:]
