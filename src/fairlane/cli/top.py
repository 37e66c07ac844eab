"""The command ``top``: the overview as a live screen, twice a second; ``q`` or Ctrl-C ends it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from ..errors import FairlaneError
from ..reading import LaneReading
from . import display, records
from .command import Command, json_option, run, store_options
from .display import number, plain
from .overview import Overview, look, queue_table, worker_table
from .target import Target

if TYPE_CHECKING:
    from ..client import Client

INTERVAL = 0.5
RATE_SECONDS = 5.0
"""The rate is that of the last seconds: shorter it flickers, longer it lags."""
LONGEST_LANES = 8
QUEUES_READ = 5
"""Lanes are read for this many queues, those with the most waiting: a look must stay cheap."""


@click.command("top", cls=Command)
@store_options
@json_option
def top_command(app_name: str | None, url: str | None, as_json: bool) -> None:
    """Watch queues, workers and the longest lanes live. Without a terminal, or with --json, look once."""
    target = Target(app_name, url)
    if not as_json and sys.stdout.isatty():
        with contextlib.suppress(KeyboardInterrupt):
            run(_live(target))
        return
    overview, lanes = run(_once(target))
    if as_json:
        lane_records = [records.lane_record(lane) for lane in lanes]
        display.show_json({"store": target.shown_url, **overview.record(), "lanes": lane_records})
    else:
        display.show(screen(target.shown_url, overview, lanes, None))


async def _once(target: Target) -> tuple[Overview, list[LaneReading]]:
    async with target.client() as client:
        overview = await look(client)
        return overview, await longest_lanes(client, overview)


async def longest_lanes(client: Client, overview: Overview) -> list[LaneReading]:
    """The lanes with the most waiting jobs, over all queues."""
    busy = sorted(overview.queues, key=lambda queue: -queue.counts.pending)[:QUEUES_READ]
    found = [
        lane
        for queue in busy
        if queue.counts.pending or queue.counts.running
        for lane in await client.lanes(queue.name, limit=LONGEST_LANES)
    ]
    return sorted(found, key=lambda lane: (-lane.pending, -lane.running))[:LONGEST_LANES]


class Rate:
    """Jobs completed per second, by what the counts say at each look."""

    def __init__(self) -> None:
        self._looks: list[tuple[float, int]] = []

    def seen(self, overview: Overview) -> float | None:
        """The rate with this look; None at the first."""
        now = time.monotonic()
        self._looks = [each for each in self._looks if now - each[0] <= RATE_SECONDS]
        self._looks.append((now, sum(queue.counts.completed for queue in overview.queues)))
        (first, before), (last, after) = self._looks[0], self._looks[-1]
        return (after - before) / (last - first) if last > first else None


def screen(store: str, overview: Overview, lanes: list[LaneReading], rate: float | None) -> RenderableType:
    """Everything below each other."""
    head = Text("store ", style="dim") + plain(store) + Text("   leader ", style="dim") + overview.leader_text()
    if rate is not None:
        head += Text("   done ", style="dim") + Text(f"{rate:,.1f}/s", style="green")
    parts: list[RenderableType] = [head, queue_table(overview.queues), worker_table(overview.workers)]
    if lanes:
        parts.append(lane_table(lanes))
    return Group(*parts)


def lane_table(lanes: list[LaneReading]) -> RenderableType:
    """Lanes of several queues."""
    return display.table(
        ("longest lanes", "queue", ">pending", ">running", "terms"),
        [
            (
                plain(lane.lane, most=60) if lane.lane is not None else Text("(no lane)", style="dim"),
                plain(lane.queue),
                number(lane.pending, "yellow"),
                number(lane.running, "bright_blue"),
                lane_terms(lane),
            )
            for lane in lanes
        ],
    )


def lane_terms(lane: LaneReading) -> Text:
    """What holds for a lane, in words; nothing when it is as usual."""
    terms = lane.terms
    if terms.paused:
        return Text("paused", style="bold yellow")
    words = [f"limit {terms.limit}"] if terms.limit is not None else []
    words += ["ordered"] if terms.ordered else []
    words += [f"weight {terms.weight:g}"] if terms.weight != 1 else []
    return Text(", ".join(words), style="dim")


async def _live(target: Target) -> None:
    rate = Rate()
    ended = asyncio.Event()
    async with target.client() as client:
        with _keys(ended), Live(screen=True, auto_refresh=False, console=display.console()) as live:
            while not ended.is_set():
                try:
                    overview = await look(client)
                    lanes = await longest_lanes(client, overview)
                    shown = screen(target.shown_url, overview, lanes, rate.seen(overview))
                except FairlaneError as exc:
                    # A store that is away for a while is something to watch, not a reason to end.
                    shown = plain(f"the store cannot be read: {exc}", "bold red")
                live.update(Group(shown, Text("q ends", style="dim")), refresh=True)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), INTERVAL)


@contextlib.contextmanager
def _keys(ended: asyncio.Event) -> Iterator[None]:
    """Set `ended` when q is pressed; the terminal is as before afterwards."""
    if not sys.stdin.isatty():
        yield
        return
    import os
    import termios
    import tty

    loop, fd = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def pressed() -> None:
        if b"q" in os.read(fd, 64).lower():
            ended.set()

    tty.setcbreak(fd)
    loop.add_reader(fd, pressed)
    try:
        yield
    finally:
        loop.remove_reader(fd)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
