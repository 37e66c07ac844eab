"""Tokens of the HTTP service: stored with their digests, listed, revoked."""

from __future__ import annotations

import asyncio

import pytest

from fairlane.errors import Conflict, NotFound
from fairlane.model import tokens
from fairlane.model.tokens import Scope

from .kit import Kit


async def test_a_token_is_stored_and_listed_as_it_was_made(kit: Kit) -> None:
    assert await kit.store.tokens() == []
    plain, _ = tokens.make("robot", ["read"])
    bound, secret = tokens.make(
        "Ännchen ✓", ["enqueue", "read"], queues=["images", "mail"], lane_prefix="user:ann", expires=90.5
    )
    first = await kit.store.add_token(plain)
    began = kit.clock.now()
    kit.clock.advance(10)
    second = await kit.store.add_token(bound)
    assert first == tokens.stored(plain, began)
    assert second == tokens.stored(bound, began + 10)
    assert second.matches(secret)
    assert (second.scopes, second.queues) == ((Scope.READ, Scope.ENQUEUE), ("images", "mail"))
    assert await kit.store.tokens() == [first, second]


async def test_storing_a_token_again_changes_nothing(kit: Kit) -> None:
    new, _ = tokens.make("robot", ["read"], expires=60)
    first = await kit.store.add_token(new)
    kit.clock.advance(5)
    assert await kit.store.add_token(new) == first
    other, _ = tokens.make("other", ["admin"])
    with pytest.raises(Conflict, match="token"):
        await kit.store.add_token(tokens.NewToken(id=new.id, name="x", digest=other.digest, scopes=(Scope.ADMIN,)))
    assert await kit.store.tokens() == [first]


async def test_a_revoked_token_stays_listed_and_stays_revoked(kit: Kit) -> None:
    new, _ = tokens.make("robot", ["read"])
    other, _ = tokens.make("other", ["operate"])
    for each in (new, other):
        await kit.store.add_token(each)
    kit.clock.advance(5)
    now = kit.clock.now()
    assert await kit.store.revoke_token(new.id)
    kit.clock.advance(5)
    assert not await kit.store.revoke_token(new.id)
    found = {token.id: token for token in await kit.store.tokens()}
    assert found[new.id].revoked_at == now
    assert not found[new.id].is_valid(now)
    assert found[other.id].revoked_at is None
    again = await kit.store.add_token(new)
    assert again.revoked_at == now
    with pytest.raises(NotFound, match="token"):
        await kit.store.revoke_token("nobody")
    with pytest.raises(NotFound, match="token"):
        await kit.store.revoke_token("a\0b\ud800")


async def test_of_many_that_revoke_a_token_at_once_one_did(kit: Kit) -> None:
    new, _ = tokens.make("robot", ["read"])
    await asyncio.gather(*(kit.store.add_token(new) for _ in range(5)))
    assert len(await kit.store.tokens()) == 1
    answers = await asyncio.gather(*(kit.store.revoke_token(new.id) for _ in range(5)))
    assert sorted(answers) == [False, False, False, False, True]
