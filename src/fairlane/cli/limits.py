"""The command ``limit``: shows and overrides how many jobs of a queue and of its lanes run at once."""

from __future__ import annotations

from typing import Any

import click
import msgspec
from rich.console import RenderableType
from rich.text import Text

from .. import documents
from ..errors import InvalidInput, NotFound
from ..model.lanes import terms
from ..model.names import shown
from ..model.reading import QueueReading
from . import display
from .command import Command, json_option, run, store_options
from .context import CommandContext, StoreAccess
from .display import plain

NO_LIMIT = "none"


class Limit(click.ParamType[int | str]):
    """A whole number, or ``none``."""

    name = "limit"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """Return the number, or ``none``."""
        text = str(value).strip().lower()
        if text == NO_LIMIT:
            return text
        if not text.isdecimal():
            self.fail(f"{value!r} is neither a whole number nor 'none'", param, ctx)
        return int(text)


@click.command("limit", cls=Command)
@click.argument("queue")
@click.argument("limit", metavar="[N]", type=Limit(), required=False)
@click.option("--lane", metavar="PATTERN", help="Lanes that match: a key, or a prefix followed by *.")
@click.option("--clear", is_flag=True, help="Remove the override; the declared limit applies again.")
@store_options
@json_option
def limit_command(
    queue: str,
    limit: int | str | None,
    lane: str | None,
    clear: bool,
    app_name: str | None,
    url: str | None,
    as_json: bool,
) -> None:
    """Show how many jobs of QUEUE may run at once, or override it with N; `none` removes the limit."""
    if clear and limit is not None:
        raise InvalidInput("--clear", "removes an override and cannot be combined with a number")
    changes = clear or limit is not None

    async def work(context: CommandContext) -> None:
        async with context.client() as client:
            if clear:
                await client.clear_limit(queue, lane=lane)
            elif limit is not None:
                await client.set_limit(queue, limit if isinstance(limit, int) else None, lane=lane)
            reading = next((each for each in await client.queues() if each.name == queue), None)
        if reading is None:
            raise NotFound(f"queue {shown(queue)} does not exist in {context.shown_url}")
        rows = limit_records(reading)
        if lane is not None:
            rows = [row for row in rows if row["lane"] == lane]
        if as_json:
            display.show_json({"store": context.shown_url, "queue": queue, "limits": rows})
        elif rows:
            display.show(limit_table(rows))
        else:
            display.show(display.empty(f"no limit for lane {lane} of queue {queue}", context.shown_url))

    run(work(CommandContext(app_name, url, StoreAccess.CHANGE if changes else StoreAccess.READ)))


def limit_records(queue: QueueReading) -> list[documents.Record]:
    """The limit of a queue and of each lane pattern: declared, overridden, and in force."""
    override = queue.override
    whole = override is not None and override.limit is not msgspec.UNSET
    found = [_record(None, queue.declared.limit, whole, queue.settings.limit, queue.settings.paused)]
    declared = {rule.pattern: rule for rule in queue.declared.lanes}
    overridden = {rule.pattern: rule for rule in (() if override is None else override.lanes)}
    for pattern in sorted({*declared, *overridden}):
        known, over = declared.get(pattern), overridden.get(pattern)
        counts = over or known
        assert counts is not None
        limit = terms(queue.declared, pattern).limit
        found.append(_record(pattern, limit, over is not None and over.limit != limit, counts.limit, counts.paused))
    return found


def _record(
    lane: str | None, declared: int | None, overridden: bool, limit: int | None, paused: bool
) -> documents.Record:
    return {"lane": lane, "declared": declared, "overridden": overridden, "limit": limit, "paused": paused}


def limit_table(rows: list[documents.Record]) -> RenderableType:
    """Limits as a table."""
    return display.table(
        ("|lanes", ">declared", ">override", ">in force", "note"),
        [
            (
                plain(row["lane"]) if row["lane"] is not None else Text("(whole queue)", style="dim"),
                plain(row["declared"] or NO_LIMIT),
                plain((row["limit"] or NO_LIMIT) if row["overridden"] else None, "yellow"),
                plain(row["limit"] or NO_LIMIT, "bold"),
                Text("paused", style="bold yellow") if row["paused"] else Text(""),
            )
            for row in rows
        ],
    )
