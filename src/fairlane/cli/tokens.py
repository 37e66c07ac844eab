"""The command ``tokens``: lists, creates and revokes the access tokens of the HTTP service."""

from __future__ import annotations

import time
from typing import Any, TypedDict, Unpack

import click
from rich.text import Text

from .. import documents
from ..errors import InvalidInput
from ..model.tokens import AccessToken, Scope
from . import display
from .command import Command, json_option, run, store_options
from .context import CommandContext, StoreAccess
from .display import plain
from .selection import Age

NEW, REVOKE = "new", "revoke"
USES = {None: StoreAccess.READ, NEW: StoreAccess.CREATE, REVOKE: StoreAccess.CHANGE}


class TokenOptions(TypedDict):
    """The options of a new token."""

    scopes: tuple[str, ...]
    queues: tuple[str, ...]
    lane_prefix: str | None
    expires: float | None


@click.command("tokens", cls=Command)
@click.argument("action", metavar="[new|revoke]", type=click.Choice([NEW, REVOKE]), required=False)
@click.argument("subject", metavar="[NAME|ID]", required=False)
@click.option(
    "--scope",
    "scopes",
    type=click.Choice([scope.value for scope in Scope]),
    multiple=True,
    help="A permission of the new token; repeatable.",
)
@click.option("--queue", "-q", "queues", multiple=True, help="Restrict it to this queue; repeatable.")
@click.option("--lane-prefix", metavar="PREFIX", help="Restrict it to one lane (user:ann), or to a prefix (user:).")
@click.option(
    "--expires", type=Age(), metavar="AGE", help="How long it is valid: 90s, 2h, 30d. [default: until revoked]"
)
@store_options
@json_option
def tokens_command(
    action: str | None,
    subject: str | None,
    app_name: str | None,
    url: str | None,
    as_json: bool,
    **options: Unpack[TokenOptions],
) -> None:
    """List the access tokens of the HTTP service, create one (new NAME), or revoke one (revoke ID)."""
    if action is not None and subject is None:
        raise InvalidInput(action, "needs a name or id: fairlane tokens new NAME, or fairlane tokens revoke ID")
    if action != NEW and any(options.values()):
        raise InvalidInput("--scope", "and the other options of a token apply only to fairlane tokens new NAME")
    if action == NEW and not options["scopes"]:
        raise InvalidInput("--scope", f"is required: one or more of {', '.join(Scope)}")
    context = CommandContext(app_name, url, USES[action])
    if subject is None:
        run(_list(context, as_json))
    elif action == NEW:
        run(_create(context, subject, options, as_json))
    else:
        run(_revoke(context, subject, as_json))


async def _list(context: CommandContext, as_json: bool) -> None:
    async with context.client() as client:
        tokens = await client.tokens()
    now = time.time()
    if as_json:
        display.show_json({"store": context.shown_url, "tokens": [token_record(token, now) for token in tokens]})
        return
    rows = [
        (
            plain(token.id, "bold"),
            plain(token.name),
            plain(" ".join(token.scopes)),
            plain(None if token.queues is None else " ".join(token.queues)),
            plain(token.lane_prefix),
            plain(f"…{token.hint}"),
            Text(display.ago(token.created_at, now)),
            _status(token, now),
        )
        for token in tokens
    ]
    columns = ("|id", "name", "scopes", "queues", "lanes", "|secret", "created", "status")
    hint = "create one: fairlane tokens new NAME --scope read"
    display.show(display.table(columns, rows) if rows else display.empty("no tokens", context.shown_url, hint))


def _status(token: AccessToken, now: float) -> Text:
    if token.revoked_at is not None:
        return Text(f"revoked {display.ago(token.revoked_at, now)}", style="red")
    if not token.is_valid(now):
        return Text(f"expired {display.ago(token.expires_at, now)}", style="yellow")
    return Text("valid" if token.expires_at is None else f"expires {display.ago(token.expires_at, now)}", style="green")


async def _create(context: CommandContext, name: str, options: TokenOptions, as_json: bool) -> None:
    async with context.client() as client:
        token, secret = await client.make_token(
            name, options["scopes"], options["queues"] or None, options["lane_prefix"], options["expires"]
        )
    if as_json:
        record = token_record(token, token.created_at)
        display.show_json({"store": context.shown_url, "token": record, "secret": secret})
        return
    # Only the secret goes to standard output, so that a script can capture it.
    click.echo(f"token {token.id} for {' '.join(token.scopes)}; its secret is shown once and never again:", err=True)
    click.echo(secret)


async def _revoke(context: CommandContext, id: str, as_json: bool) -> None:
    async with context.client() as client:
        revoked = await client.revoke_token(id)
    if as_json:
        display.show_json({"store": context.shown_url, "id": id, "revoked": True, "now": revoked})
        return
    display.show(plain(f"token {id} is revoked" if revoked else f"token {id} was already revoked"))


def token_record(token: AccessToken, now: float) -> documents.Record:
    """A token as a document, without its digest."""
    found: dict[str, Any] = {
        "id": token.id,
        "name": token.name,
        "scopes": [scope.value for scope in token.scopes],
        "queues": None if token.queues is None else list(token.queues),
        "lane_prefix": token.lane_prefix,
        "hint": token.hint,
        "created_at": token.created_at,
        "expires_at": token.expires_at,
        "revoked_at": token.revoked_at,
        "valid": token.is_valid(now),
    }
    return found
