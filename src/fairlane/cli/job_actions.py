"""The commands that change jobs: ``retry``, ``cancel``, ``purge`` and ``release``."""

from __future__ import annotations

from typing import Unpack

import click

from ..errors import InvalidInput
from . import display
from .command import Command, json_option, run, store_options
from .context import CommandContext, StoreAccess
from .display import plain
from .selection import (
    CANCEL,
    CANCEL_AND_PURGE,
    PURGE,
    RETRY,
    SelectionOptions,
    change_selected,
    read_selection,
    selection_options,
)

RELEASES = {
    "nothing": "is not bound",
    "draining": "will be released when its jobs have ended",
    "released": "is released",
}


@click.command("cancel", cls=Command)
@click.argument("ids", metavar="[JOB]...", nargs=-1)
@selection_options("Cancel")
@store_options
@json_option
def cancel_command(
    ids: tuple[str, ...], app_name: str | None, url: str | None, as_json: bool, **options: Unpack[SelectionOptions]
) -> None:
    """Cancel jobs by id or by selection. Waiting jobs end at once; running jobs are asked to stop."""
    selection = read_selection(ids, options, "cancel")
    context = CommandContext(app_name, url, StoreAccess.CHANGE)
    if selection is not None:
        change_selected(context, CANCEL, selection, as_json)
        return

    async def work(context: CommandContext) -> None:
        async with context.client() as client:
            answers = await client.cancel(ids)
        if as_json:
            display.show_json({"jobs": [{"id": i, "answer": a.value} for i, a in zip(ids, answers, strict=True)]})
            return
        words = {"requested": "is running and was asked to stop", "cancelled": "is cancelled"}
        for id, answer in zip(ids, answers, strict=True):
            display.show(plain(f"{id} {words.get(answer.value, f'is {answer.value} already')}"))

    run(work(context))


@click.command("retry", cls=Command)
@click.argument("ids", metavar="[JOB]...", nargs=-1)
@click.option("--failed", is_flag=True, help="Select all failed jobs; the same as --state failed.")
@selection_options("Retry")
@store_options
@json_option
def retry_command(
    ids: tuple[str, ...],
    failed: bool,
    app_name: str | None,
    url: str | None,
    as_json: bool,
    **options: Unpack[SelectionOptions],
) -> None:
    """Run ended jobs again, as new jobs: jobs by id, or failed jobs by selection."""
    if failed:
        if options["state"] not in (None, "failed"):
            raise InvalidInput("--failed", f"cannot be combined with --state {options['state']}")
        options["state"] = "failed"
    selection = read_selection(ids, options, "retry")
    context = CommandContext(app_name, url, StoreAccess.CHANGE)
    if selection is not None:
        change_selected(context, RETRY, selection, as_json)
    else:
        run(_retry(context, ids, as_json))


@click.command("purge", cls=Command)
@click.option("--cancel-waiting", is_flag=True, help="Include waiting jobs: cancel them first.")
@selection_options("Delete")
@store_options
@json_option
def purge_command(
    cancel_waiting: bool, app_name: str | None, url: str | None, as_json: bool, **options: Unpack[SelectionOptions]
) -> None:
    """Delete ended jobs by selection, before their retention is over. Running jobs are kept."""
    if options["state"] in ("pending", "scheduled") and not cancel_waiting:
        raise InvalidInput(
            "--state", f"a {options['state']} job has not ended; add --cancel-waiting to cancel it first"
        )
    selection = read_selection((), options, "delete")
    assert selection is not None
    action = CANCEL_AND_PURGE if cancel_waiting else PURGE
    change_selected(CommandContext(app_name, url, StoreAccess.CHANGE), action, selection, as_json)


async def _retry(context: CommandContext, ids: tuple[str, ...], as_json: bool) -> None:
    async with context.client() as client:
        new = [(id, (await client.retry(id)).id) for id in ids]
    if as_json:
        display.show_json({"jobs": [{"id": other, "retry_of": id} for id, other in new]})
        return
    for id, other in new:
        display.show(plain(f"{id} was sent again as {other}"))


@click.command("release", cls=Command)
@click.argument("key")
@click.option("--pool", default="default", show_default=True)
@store_options
@json_option
def release_command(key: str, pool: str, app_name: str | None, url: str | None, as_json: bool) -> None:
    """Release a sticky KEY from its worker once its jobs have ended."""

    async def work(context: CommandContext) -> None:
        async with context.client() as client:
            answer = await client.release(key, pool=pool)
        if as_json:
            display.show_json({"key": key, "pool": pool, "answer": answer.value})
            return
        display.show(plain(f"{key} {RELEASES[answer.value]}"))

    run(work(CommandContext(app_name, url, StoreAccess.CHANGE)))
