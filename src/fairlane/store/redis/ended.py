"""The feed of jobs that ended as failed or cancelled."""

from __future__ import annotations

import re
from typing import Any

from ...errors import InvalidInput
from ...model.ended import EndedJob, EndedPage
from ..shared.rows import ended_of
from ..shared.stored_settings import readable
from .functions import Functions

_CURSOR = re.compile(r"([0-9.]{0,40})_([0-9]{1,15})", re.ASCII)


async def read_ended(functions: Functions, after: str | None, limit: int) -> EndedPage:
    """The next failed and cancelled jobs. The server runs one step at a time, so their numbers are in order."""
    generation = number = ""
    if after is not None:
        found = _CURSOR.fullmatch(after)
        if found is None:
            raise InvalidInput("cursor", "is not a cursor that a page returned")
        generation, number = found.groups()
    answer = await functions.call("ended", generation, number, limit)
    return EndedPage(
        jobs=tuple(readable("job that ended", _job_of, answer["jobs"])), cursor=answer["cursor"], more=answer["more"]
    )


def _job_of(row: list[Any]) -> EndedJob:
    # A list of the functions has no room for nil.
    return ended_of([None if each is False else each for each in row])
