"""Ids are made by the client, so that repeating a call whose reply was lost does not make a second job.

UUIDv7: ordered by time, so new rows land beside each other in an index; 74 random bits, so no two ever meet.
"""

from __future__ import annotations

from uuid_utils import uuid7


def new_id() -> str:
    """A fresh id for a job or a session."""
    return str(uuid7())
