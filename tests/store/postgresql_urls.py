"""URLs of the same database for another user."""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit


def as_role(url: str, role: str) -> str:
    """The URL with another user, and perhaps a password behind a colon, in it."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{role}@{parts.netloc.rpartition('@')[2]}"))
