"""The commands ``queues``, ``lanes``, ``workers``, ``bindings``, ``pause`` and ``resume``."""

from __future__ import annotations

import time
from typing import Any

import click
from rich.text import Text

from .. import documents
from ..model.session import SessionState
from . import display
from .command import Command, json_option, run, store_options
from .context import CommandContext, StoreAccess
from .display import number, plain
from .overview import queue_table, worker_table


@click.command("queues", cls=Command)
@store_options
@json_option
def queues_command(app_name: str | None, url: str | None, as_json: bool) -> None:
    """List the queues with their jobs by state, workers and settings."""

    async def work(context: CommandContext) -> None:
        async with context.client() as client:
            queues = await client.queues()
        if as_json:
            display.show_json(
                {"store": context.shown_url, "queues": [documents.queue_record(queue) for queue in queues]}
            )
        else:
            display.show(queue_table(queues, context.shown_url))

    run(work(CommandContext(app_name, url)))


@click.command("lanes", cls=Command)
@click.argument("queue")
@click.option("--limit", type=click.IntRange(1, 500), default=50, show_default=True)
@store_options
@json_option
def lanes_command(queue: str, limit: int, app_name: str | None, url: str | None, as_json: bool) -> None:
    """List the lanes of QUEUE that have jobs, longest first."""

    async def work(context: CommandContext) -> None:
        async with context.client() as client:
            lanes = await client.lanes(queue, limit=limit)
        if as_json:
            display.show_json({"store": context.shown_url, "lanes": [documents.lane_record(lane) for lane in lanes]})
            return
        rows = [
            (
                plain(lane.lane) if lane.lane is not None else Text("(no lane)", style="dim"),
                number(lane.pending, "yellow", exact=lane.exact),
                number(lane.running, "bright_blue"),
                plain("0 (paused)" if lane.terms.paused else lane.terms.limit),
                plain(f"{lane.terms.weight:g}"),
                _lane_note(lane.terms.ordered, lane.terms.paused),
            )
            for lane in lanes
        ]
        display.show(
            display.table(("|lane", ">pending", ">running", ">limit", ">weight", "note"), rows)
            if rows
            else display.empty(f"no lane of queue {queue} has jobs", context.shown_url)
        )

    run(work(CommandContext(app_name, url)))


def _lane_note(ordered: bool, paused: bool) -> Text:
    return Text("paused", style="bold yellow") if paused else Text("ordered" if ordered else "", style="dim")


@click.command("workers", cls=Command)
@click.option(
    "--all", "all_sessions", is_flag=True, help="Include managers, sessions that wait for a turn, and ended ones."
)
@store_options
@json_option
def workers_command(all_sessions: bool, app_name: str | None, url: str | None, as_json: bool) -> None:
    """List the running workers."""

    async def work(context: CommandContext) -> None:
        async with context.client() as client:
            sessions = await client.sessions()
        if not all_sessions:
            present = (SessionState.LIVE, SessionState.STOPPING)
            sessions = [s for s in sessions if s.kind.value == "worker" and s.state in present]
        if as_json:
            display.show_json(
                {"store": context.shown_url, "workers": [documents.session_record(session) for session in sessions]}
            )
        else:
            display.show(worker_table(sessions, context.shown_url))

    run(work(CommandContext(app_name, url)))


@click.command("bindings", cls=Command)
@click.option("--pool", help="Only bindings of this pool.")
@click.option("--key", help="Only bindings of this sticky key.")
@click.option("--limit", type=click.IntRange(1, 500), default=50, show_default=True)
@store_options
@json_option
def bindings_command(app_name: str | None, url: str | None, as_json: bool, **which: Any) -> None:
    """List which sticky key is bound to which worker, open bindings first."""

    async def work(context: CommandContext) -> None:
        async with context.client() as client:
            bindings = await client.bindings(**which)
        if as_json:
            display.show_json(
                {"store": context.shown_url, "bindings": [documents.binding_record(binding) for binding in bindings]}
            )
            return
        now = time.time()
        rows = [
            (
                plain(binding.key),
                plain(f"{binding.pool}/{binding.index}"),
                display.state_text(binding.state.value),
                Text(display.ago(binding.opened_at, now)),
                Text(display.ago(binding.used_at, now)),
                Text(display.ago(binding.closed_at, now)),
                plain(binding.cleanup, "red" if binding.cleanup_failed else ""),
            )
            for binding in bindings
        ]
        display.show(
            display.table(("key", "worker", "state", "opened", "used", "closed", "clean-up"), rows)
            if rows
            else display.empty("no bindings", context.shown_url)
        )

    run(work(CommandContext(app_name, url)))


@click.command("pause", cls=Command)
@click.argument("queue")
@click.option("--lane", help="Only this lane of the queue.")
@store_options
@json_option
def pause_command(queue: str, lane: str | None, app_name: str | None, url: str | None, as_json: bool) -> None:
    """Start no more jobs of QUEUE until it is resumed. Running jobs continue."""
    run(_set_paused(CommandContext(app_name, url, StoreAccess.CHANGE), queue, lane, True, as_json))


@click.command("resume", cls=Command)
@click.argument("queue")
@click.option("--lane", help="Only this lane of the queue.")
@store_options
@json_option
def resume_command(queue: str, lane: str | None, app_name: str | None, url: str | None, as_json: bool) -> None:
    """Resume a paused QUEUE."""
    run(_set_paused(CommandContext(app_name, url, StoreAccess.CHANGE), queue, lane, False, as_json))


async def _set_paused(context: CommandContext, queue: str, lane: str | None, paused: bool, as_json: bool) -> None:
    async with context.client() as client:
        await (client.pause if paused else client.resume)(queue, lane)
    if as_json:
        display.show_json({"queue": queue, "lane": lane, "paused": paused})
        return
    what = f"queue {queue}" if lane is None else f"lane {lane} of queue {queue}"
    undo = f"; undo it with `fairlane resume {queue}`" if paused and lane is None else ""
    display.show(plain(f"{what} is {'paused' if paused else 'no longer paused'}{undo}"))
