"""Access tokens: secrets, scopes and what a token is bound to."""

from __future__ import annotations

import re
from typing import Any

import pytest

from fairlane.errors import InvalidInput
from fairlane.model import tokens
from fairlane.model.tokens import AccessToken, Scope


def _token(**fields: Any) -> tuple[AccessToken, str]:
    new, secret = tokens.make(fields.pop("name", "a"), fields.pop("scopes", ["read"]), **fields)
    return tokens.stored(new, 1_000.0), secret


def test_a_secret_names_its_token_and_is_nowhere_in_it() -> None:
    token, secret = _token()
    assert re.fullmatch(r"fl_[0-9a-f]{12}_[A-Za-z0-9_-]{43}", secret)
    assert secret.split("_")[1] == token.id
    assert token.hint == secret[-4:]
    assert len(token.digest) == 32
    assert secret[16:-4] not in repr(token)
    assert repr(token.digest) not in repr(token)
    assert _token()[1] != secret


def test_only_its_own_secret_matches() -> None:
    token, secret = _token()
    assert token.matches(secret)
    for other in (_token()[1], secret[:-1], secret + "a", "", "é", "\ud800"):
        assert not token.matches(other)


def test_scopes_include_others() -> None:
    allowed = {scope: {other for other in Scope if _token(scopes=[scope])[0].allows(other)} for scope in Scope}
    assert allowed == {
        Scope.READ: {Scope.READ},
        Scope.ENQUEUE: {Scope.ENQUEUE},
        Scope.OPERATE: {Scope.OPERATE, Scope.READ},
        Scope.ADMIN: set(Scope),
    }
    both, _ = _token(scopes=["enqueue", "read", "read"])
    assert both.scopes == (Scope.READ, Scope.ENQUEUE)
    assert not both.allows(Scope.OPERATE)


def test_a_token_may_be_bound_to_queues() -> None:
    token, _ = _token(queues=["images", "mail"])
    assert [token.covers_queue(queue) for queue in ("images", "mail", "imag", "default")] == [True, True, False, False]
    assert _token()[0].covers_queue("anything")


def test_a_lane_prefix_opens_no_neighbour() -> None:
    one, _ = _token(lane_prefix="user:ann")
    assert [one.covers_lane(lane) for lane in ("user:ann", "user:anna", "user:ann/2", "user:", None)] == [
        True,
        False,
        False,
        False,
        False,
    ]
    many, _ = _token(lane_prefix="acme/")
    assert [many.covers_lane(lane) for lane in ("acme/", "acme/x", "acme", "acmex", None)] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert all(_token()[0].covers_lane(lane) for lane in ("x", None))


def test_a_token_ends() -> None:
    token, _ = _token(expires=60.0)
    assert (token.created_at, token.expires_at) == (1_000.0, 1_060.0)
    assert token.is_valid(1_059.9)
    assert not token.is_valid(1_060.0)
    assert _token()[0].is_valid(1e10)


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("name", {"name": ""}),
        ("name", {"name": "a\nb"}),
        ("scopes", {"scopes": []}),
        ("scopes", {"scopes": ["write"]}),
        ("scopes", {"scopes": "read"}),
        ("queues", {"queues": []}),
        ("queues", {"queues": "images"}),
        ("queues", {"queues": ["a b"]}),
        ("queues", {"queues": [f"q{n}" for n in range(101)]}),
        ("lane_prefix", {"lane_prefix": ""}),
        ("lane_prefix", {"lane_prefix": "user:*"}),
        ("scopes", {"scopes": ["admin"], "queues": ["images"]}),
        ("scopes", {"scopes": ["admin", "read"], "lane_prefix": "user:"}),
        ("expires", {"expires": 0.0}),
        ("expires", {"expires": float("nan")}),
    ],
)
def test_bad_input_names_its_field(field: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as refused:
        _token(**wrong)
    assert refused.value.field == field
