"""Commands that change jobs: ``retry``, ``cancel``, ``purge``, ``release``."""

from __future__ import annotations

from typing import Unpack

import click

from ..errors import InvalidInput
from . import display
from .command import Command, json_option, run, store_options
from .context import Target, Use
from .display import plain
from .selection import CANCEL, CANCEL_AND_PURGE, PURGE, RETRY, Given, change_many, read_selection, selection_options

RELEASES = {
    "nothing": "is not bound",
    "draining": "is released when its jobs have ended",
    "released": "is released",
}


@click.command("cancel", cls=Command)
@click.argument("ids", metavar="[JOB]...", nargs=-1)
@selection_options("Cancel")
@store_options
@json_option
def cancel_command(
    ids: tuple[str, ...], app_name: str | None, url: str | None, as_json: bool, **options: Unpack[Given]
) -> None:
    """Cancel jobs: waiting ones at once, running ones by asking them to stop. By their ids, or by a selection."""
    asked = read_selection(ids, options, "cancel")
    target = Target(app_name, url, Use.CHANGE)
    if asked is not None:
        change_many(target, CANCEL, asked, as_json)
        return

    async def work(target: Target) -> None:
        async with target.client() as client:
            answers = await client.cancel(ids)
        if as_json:
            display.show_json({"jobs": [{"id": i, "answer": a.value} for i, a in zip(ids, answers, strict=True)]})
            return
        words = {"requested": "runs, and was asked to stop", "cancelled": "is cancelled"}
        for id, answer in zip(ids, answers, strict=True):
            display.show(plain(f"{id} {words.get(answer.value, f'was too late: it is {answer.value}')}"))

    run(work(target))


@click.command("retry", cls=Command)
@click.argument("ids", metavar="[JOB]...", nargs=-1)
@click.option("--failed", is_flag=True, help="All failed jobs: as --state failed.")
@selection_options("Retry")
@store_options
@json_option
def retry_command(
    ids: tuple[str, ...],
    failed: bool,
    app_name: str | None,
    url: str | None,
    as_json: bool,
    **options: Unpack[Given],
) -> None:
    """Run jobs that have ended once more, as new jobs: by their ids, or failed ones by a selection."""
    if failed:
        if options["state"] not in (None, "failed"):
            raise InvalidInput("--failed", f"does not go with --state {options['state']}")
        options["state"] = "failed"
    asked = read_selection(ids, options, "retry")
    target = Target(app_name, url, Use.CHANGE)
    if asked is not None:
        change_many(target, RETRY, asked, as_json)
    else:
        run(_retry(target, ids, as_json))


@click.command("purge", cls=Command)
@click.option("--cancel-waiting", is_flag=True, help="Also jobs that wait: they are cancelled first.")
@selection_options("Forget")
@store_options
@json_option
def purge_command(
    cancel_waiting: bool, app_name: str | None, url: str | None, as_json: bool, **options: Unpack[Given]
) -> None:
    """Forget jobs that have ended before their retention is over, by a selection. Running ones stay."""
    if options["state"] in ("pending", "scheduled") and not cancel_waiting:
        raise InvalidInput("--state", f"a {options['state']} job has not ended; --cancel-waiting cancels it first")
    asked = read_selection((), options, "forget")
    assert asked is not None
    verb = CANCEL_AND_PURGE if cancel_waiting else PURGE
    change_many(Target(app_name, url, Use.CHANGE), verb, asked, as_json)


async def _retry(target: Target, ids: tuple[str, ...], as_json: bool) -> None:
    async with target.client() as client:
        new = [(id, (await client.retry(id)).id) for id in ids]
    if as_json:
        display.show_json({"jobs": [{"id": other, "retry_of": id} for id, other in new]})
        return
    for id, other in new:
        display.show(plain(f"{id} runs again as {other}"))


@click.command("release", cls=Command)
@click.argument("key")
@click.option("--pool", default="default", show_default=True)
@store_options
@json_option
def release_command(key: str, pool: str, app_name: str | None, url: str | None, as_json: bool) -> None:
    """Release a sticky KEY from its worker, once its jobs have ended."""

    async def work(target: Target) -> None:
        async with target.client() as client:
            answer = await client.release(key, pool=pool)
        if as_json:
            display.show_json({"key": key, "pool": pool, "answer": answer.value})
            return
        display.show(plain(f"{key} {RELEASES[answer.value]}"))

    run(work(Target(app_name, url, Use.CHANGE)))
