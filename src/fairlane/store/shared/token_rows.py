"""Tokens of the HTTP service: their rows in the SQL stores, and checks of all stores."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from ...errors import Conflict, NotFound
from ...model.names import shown
from ...model.tokens import AccessToken, NewToken, Scope

_scopes = msgspec.json.Decoder(tuple[Scope, ...])
_queues = msgspec.json.Decoder(tuple[str, ...])


def token_row(token: AccessToken) -> tuple[Any, ...]:
    """Return the row of a token."""
    queues = None if token.queues is None else msgspec.json.encode(token.queues).decode()
    return (
        token.id, token.name, token.digest, msgspec.json.encode(token.scopes).decode(), queues, token.lane_prefix,
        token.created_at, token.expires_at, token.revoked_at, token.hint,
    )  # fmt: skip


def token_of(row: Iterable[Any]) -> AccessToken:
    """Return the token of a row."""
    id, name, digest, scopes, queues, lane_prefix, created_at, expires_at, revoked_at, hint = row
    return AccessToken(
        id=id,
        name=name,
        digest=bytes(digest),
        scopes=_scopes.decode(scopes),
        queues=None if queues is None else _queues.decode(queues),
        lane_prefix=lane_prefix,
        created_at=created_at,
        expires_at=expires_at,
        revoked_at=revoked_at,
        hint=hint,
    )


def same_token(found: AccessToken, new: NewToken) -> AccessToken:
    """Return the stored token if it is the same as the new one. Raises `Conflict` if not."""
    if found.digest != new.digest:
        raise Conflict(f"token {shown(new.id)} exists already with another secret; make a new one")
    return found


def check_token(id: str) -> None:
    """Raise `NotFound` for a text that cannot be the id of a token."""
    if len(id) > 128 or not id.isascii() or not id.isprintable():
        raise unknown_token(id)


def unknown_token(id: str) -> NotFound:
    """Return the error for a token that does not exist."""
    return NotFound(f"there is no token {shown(id)}")
