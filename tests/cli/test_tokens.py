"""The command `fairlane tokens`."""

import asyncio
import re

import pytest

from fairlane.model.tokens import AccessToken
from fairlane.store.port import Store
from tests.cli.project import Project


def _stored(project: Project) -> list[AccessToken]:
    async def look(store: Store) -> list[AccessToken]:
        return await store.tokens()

    return asyncio.run(project.with_store(look))


@pytest.mark.usefixtures("every_store")
def test_a_token_is_made_listed_and_revoked(project: Project) -> None:
    made = project.read(
        *("tokens", "new", "ann's phone", "--scope", "read", "--scope", "enqueue", "--queue", "images"),
        *("--lane-prefix", "user:ann", "--expires", "30d"),
    )
    token, secret = made["token"], made["secret"]
    assert {
        "name": "ann's phone",
        "scopes": ["read", "enqueue"],
        "queues": ["images"],
        "lane_prefix": "user:ann",
        "hint": secret[-4:],
        "valid": True,
        "revoked_at": None,
    }.items() <= token.items()
    assert token["expires_at"] == pytest.approx(token["created_at"] + 30 * 86_400)
    [stored] = _stored(project)
    assert stored.matches(secret)
    assert project.read("tokens")["tokens"] == [token]
    shown = project.good("tokens")
    assert secret not in shown
    assert token["id"] in shown
    assert project.good("tokens", "revoke", token["id"]) == f"token {token['id']} is revoked\n"
    assert project.good("tokens", "revoke", token["id"]) == f"token {token['id']} was already revoked\n"
    [listed] = project.read("tokens")["tokens"]
    assert (listed["valid"], listed["revoked_at"] is not None) == (False, True)
    assert "revoked" in project.good("tokens")


def test_the_secret_stands_alone_and_is_shown_once(project: Project) -> None:
    done = project.run("tokens", "new", "robot", "--scope", "admin")
    assert done.exit_code == 0
    secret = done.stdout.strip()
    assert re.fullmatch(r"fl_[0-9a-f]{12}_[\w-]{43}", secret)
    assert "never again" in done.stderr
    document = str(project.read("tokens"))
    assert secret not in document
    assert "digest" not in document


def test_no_tokens(project: Project) -> None:
    project.make_store()
    assert project.read("tokens")["tokens"] == []
    assert "no tokens in " in project.good("tokens")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("tokens", "new", "robot"), "--scope"),
        (("tokens", "new"), "NAME"),
        (("tokens", "revoke"), "ID"),
        (("tokens", "new", "robot", "--scope", "write"), "write"),
        (("tokens", "new", "robot", "--scope", "admin", "--queue", "a"), "scopes"),
        (("tokens", "new", "robot", "--scope", "read", "--expires", "soon"), "soon"),
        (("tokens", "new", "robot", "--scope", "read", "--lane-prefix", "user:*"), "lane_prefix"),
        (("tokens", "--scope", "read"), "--scope"),
    ],
)
def test_bad_input_stores_nothing(project: Project, args: tuple[str, ...], said: str) -> None:
    project.make_store()
    assert said in project.refused(*args)
    assert _stored(project) == []


def test_an_unknown_token_cannot_be_revoked(project: Project) -> None:
    project.make_store()
    assert "there is no token 'nobody'" in project.refused("tokens", "revoke", "nobody", code=1)
