"""The command ``top``: the overview as a live screen, twice a second; ``q`` or Ctrl-C ends it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click
import msgspec
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from .. import documents
from ..errors import FairlaneError
from ..model.job import Job, JobState
from ..model.reading import LaneReading
from . import display
from .command import Command, json_option, run, store_options
from .context import Target
from .display import number, plain
from .overview import NARROW, Overview, look, queue_table, worker_table

if TYPE_CHECKING:
    from ..client import Client

INTERVAL = 0.5
RATE_SECONDS = 5.0
"""The rate is that of the last seconds: shorter it flickers, longer it lags."""
LONGEST_LANES = 8
LOW = 40
"""Lines of a terminal below which only a few jobs and lanes are shown."""
FEW = 4
MOST_RUNNING = 8
"""Jobs of which it is shown that they run."""
QUEUES_READ = 5
"""Lanes are read for this many queues, those with the most waiting: a look must stay cheap."""


@click.command("top", cls=Command)
@store_options
@json_option
def top_command(app_name: str | None, url: str | None, as_json: bool) -> None:
    """Watch queues, workers, what runs and the longest lanes live. Without a terminal, or with --json, look once."""
    target = Target(app_name, url)
    if not as_json and sys.stdout.isatty():
        with contextlib.suppress(KeyboardInterrupt):
            run(_live(target))
        return
    sight = run(_once(target))
    if as_json:
        display.show_json({"store": target.shown_url, **sight.record()})
    else:
        display.show(screen(target.shown_url, sight, Rates(), display.console().width))


class Sight(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one look shows."""

    overview: Overview
    lanes: list[LaneReading]
    running: tuple[Job, ...]
    """The latest of what runs now."""

    def record(self) -> documents.Record:
        """All of it as a document."""
        return {
            **self.overview.record(),
            "lanes": [documents.lane_record(lane) for lane in self.lanes],
            "running": [documents.listed_job(job) for job in self.running],
        }


async def see(client: Client, most: int = MOST_RUNNING) -> Sight:
    """Read it all."""
    overview = await look(client)
    lanes = await longest_lanes(client, overview)
    busy = any(queue.counts.running for queue in overview.queues)
    page = await client.find(state=JobState.RUNNING, limit=most) if busy else None
    return Sight(overview=overview, lanes=lanes, running=() if page is None else page.jobs)


async def _once(target: Target) -> Sight:
    async with target.client() as client:
        return await see(client)


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


class Rates:
    """Jobs that ended per second, by what the counts say at each look: completed ones, and failed ones."""

    def __init__(self) -> None:
        self._looks: list[tuple[float, int, int]] = []

    def see(self, overview: Overview) -> None:
        """Take a look in."""
        now = time.monotonic()
        self._looks = [each for each in self._looks if now - each[0] <= RATE_SECONDS]
        counts = [queue.counts for queue in overview.queues]
        self._looks.append((now, sum(each.completed for each in counts), sum(each.failed for each in counts)))

    def per_second(self) -> tuple[float, float] | None:
        """Completed and failed; None before there are two looks."""
        if len(self._looks) < 2:
            return None
        first, last = self._looks[0], self._looks[-1]
        passed = last[0] - first[0]
        return ((last[1] - first[1]) / passed, (last[2] - first[2]) / passed) if passed > 0 else None


def screen(store: str, sight: Sight, rates: Rates, width: int, height: int = LOW) -> RenderableType:
    """Everything below each other, as wide as the terminal; a low one sees fewer jobs and lanes."""
    overview = sight.overview
    head = Text("store ", style="dim") + plain(store) + Text("   leader ", style="dim") + overview.leader_text()
    parts: list[RenderableType] = [
        head,
        _summary(overview, rates),
        queue_table(overview.queues, store, width),
    ]
    most = FEW if height < LOW else None
    if sight.running:
        parts.append(running_table(sight.running[:most], width))
    parts.append(worker_table(overview.workers, store, width))
    if sight.lanes:
        parts.append(lane_table(sight.lanes[:most]))
    return Group(*parts)


def _summary(overview: Overview, rates: Rates) -> Text:
    """The numbers that matter most, in one line."""
    waits = [queue.oldest_wait for queue in overview.queues if queue.oldest_wait is not None]
    failed = sum(queue.counts.failed for queue in overview.queues)
    words = [
        ("pending ", number(sum(queue.counts.pending for queue in overview.queues), "yellow")),
        ("oldest ", Text(display.duration(max(waits)) if waits else "–", style="yellow" if waits else "dim")),
        ("running ", number(sum(queue.counts.running for queue in overview.queues), "bright_blue")),
        ("failed ", number(failed, "bold red")),
    ]
    found = rates.per_second()
    if found is not None:
        done, failing = found
        words[-1][1].append(f" ({failing:,.1f}/s)")
        words.append(("done ", Text(f"{done:,.1f}/s", style="green")))
    return Text("   ").join(Text(name, style="dim") + value for name, value in words)


def running_table(jobs: tuple[Job, ...], width: int) -> RenderableType:
    """What runs now; a narrow terminal sees the end of an id, which tells jobs apart, and the last part of a name."""
    now = time.time()
    narrow = width < NARROW
    return display.table(
        ("|runs now", "task", "lane", "|worker", ">since"),
        [
            (
                plain(f"…{job.id[-8:]}" if narrow and len(job.id) > 9 else job.id),
                plain(job.task.rpartition(".")[2] if narrow else job.task, most=24 if narrow else 60),
                plain(job.lane, most=20 if narrow else 60),
                plain(job.worker),
                Text(display.duration(None if job.started_at is None else max(0.0, now - job.started_at))),
            )
            for job in jobs
        ],
    )


def lane_table(lanes: list[LaneReading]) -> RenderableType:
    """Lanes of several queues."""
    return display.table(
        ("longest lanes", "queue", ">pending", ">running", "terms"),
        [
            (
                plain(lane.lane, most=60) if lane.lane is not None else Text("(no lane)", style="dim"),
                plain(lane.queue),
                number(lane.pending, "yellow", exact=lane.exact),
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
    rates = Rates()
    ended = asyncio.Event()
    async with target.client() as client:
        with _keys(ended), Live(screen=True, auto_refresh=False, console=display.console()) as live:
            while not ended.is_set():
                try:
                    sight = await see(client)
                    rates.see(sight.overview)
                    shown = screen(target.shown_url, sight, rates, *live.console.size)
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
