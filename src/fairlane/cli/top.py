"""The command ``top``: the overview as a live screen, refreshed twice a second; ``q`` or Ctrl-C quits."""

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
from .context import CommandContext
from .display import number, plain
from .overview import NARROW, Overview, queue_table, read_overview, worker_table

if TYPE_CHECKING:
    from ..client import Client

INTERVAL = 0.5
RATE_SECONDS = 5.0
"""The window of the rates: a shorter one flickers, a longer one lags."""
LONGEST_LANES = 8
SHORT_TERMINAL = 40
"""Height of a terminal below which only a few jobs and lanes are shown."""
FEW = 4
MOST_RUNNING = 8
"""The most running jobs that are shown."""
QUEUES_READ = 5
"""Lanes are read only for this many queues, those with the most pending jobs, to keep a refresh cheap."""


@click.command("top", cls=Command)
@store_options
@json_option
def top_command(app_name: str | None, url: str | None, as_json: bool) -> None:
    """Watch queues, workers, running jobs and the longest lanes. Prints once without a terminal or with --json."""
    context = CommandContext(app_name, url)
    if not as_json and sys.stdout.isatty():
        with contextlib.suppress(KeyboardInterrupt):
            run(_live(context))
        return
    snapshot = run(_once(context))
    if as_json:
        display.show_json({"store": context.shown_url, **snapshot.record()})
    else:
        display.show(screen(context.shown_url, snapshot, Rates(), display.console().width))


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one refresh shows."""

    overview: Overview
    lanes: list[LaneReading]
    running: tuple[Job, ...]
    """The newest running jobs."""

    def record(self) -> documents.Record:
        """The snapshot as a document."""
        return {
            **self.overview.record(),
            "lanes": [documents.lane_record(lane) for lane in self.lanes],
            "running": [documents.listed_job(job) for job in self.running],
        }


async def take_snapshot(client: Client, most: int = MOST_RUNNING) -> Snapshot:
    """Read everything that the screen shows."""
    overview = await read_overview(client)
    lanes = await longest_lanes(client, overview)
    busy = any(queue.counts.running for queue in overview.queues)
    page = await client.find(state=JobState.RUNNING, limit=most) if busy else None
    return Snapshot(overview=overview, lanes=lanes, running=() if page is None else page.jobs)


async def _once(context: CommandContext) -> Snapshot:
    async with context.client() as client:
        return await take_snapshot(client)


async def longest_lanes(client: Client, overview: Overview) -> list[LaneReading]:
    """The lanes with the most pending jobs in all queues."""
    busy = sorted(overview.queues, key=lambda queue: -queue.counts.pending)[:QUEUES_READ]
    found = [
        lane
        for queue in busy
        if queue.counts.pending or queue.counts.running
        for lane in await client.lanes(queue.name, limit=LONGEST_LANES)
    ]
    return sorted(found, key=lambda lane: (-lane.pending, -lane.running))[:LONGEST_LANES]


class Rates:
    """Completed and failed jobs per second, from the counts of recent refreshes."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, int, int]] = []

    def add(self, overview: Overview) -> None:
        """Add the counts of a refresh."""
        now = time.monotonic()
        self._samples = [each for each in self._samples if now - each[0] <= RATE_SECONDS]
        counts = [queue.counts for queue in overview.queues]
        self._samples.append((now, sum(each.completed for each in counts), sum(each.failed for each in counts)))

    def per_second(self) -> tuple[float, float] | None:
        """Completed and failed jobs per second; None before the second refresh."""
        if len(self._samples) < 2:
            return None
        first, last = self._samples[0], self._samples[-1]
        passed = last[0] - first[0]
        return ((last[1] - first[1]) / passed, (last[2] - first[2]) / passed) if passed > 0 else None


def screen(store: str, snapshot: Snapshot, rates: Rates, width: int, height: int = SHORT_TERMINAL) -> RenderableType:
    """The whole screen, as wide as the terminal. A short terminal shows fewer jobs and lanes."""
    overview = snapshot.overview
    head = Text("store ", style="dim") + plain(store) + Text("   leader ", style="dim") + overview.leader_text()
    parts: list[RenderableType] = [
        head,
        _summary(overview, rates),
        queue_table(overview.queues, store, width),
    ]
    most = FEW if height < SHORT_TERMINAL else None
    if snapshot.running:
        parts.append(running_table(snapshot.running[:most], width))
    parts.append(worker_table(overview.workers, store, width))
    if snapshot.lanes:
        parts.append(lane_table(snapshot.lanes[:most]))
    return Group(*parts)


def _summary(overview: Overview, rates: Rates) -> Text:
    """The most important numbers on one line."""
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
    """Running jobs. A narrow terminal shows the end of an id, which is unique, and the last part of a task's name."""
    now = time.time()
    narrow = width < NARROW
    return display.table(
        ("|running", "task", "lane", "|worker", ">since"),
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
    """Lanes of several queues as a table."""
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
    """The settings of a lane that differ from the default."""
    terms = lane.terms
    if terms.paused:
        return Text("paused", style="bold yellow")
    words = [f"limit {terms.limit}"] if terms.limit is not None else []
    words += ["ordered"] if terms.ordered else []
    words += [f"weight {terms.weight:g}"] if terms.weight != 1 else []
    return Text(", ".join(words), style="dim")


async def _live(context: CommandContext) -> None:
    rates = Rates()
    ended = asyncio.Event()
    async with context.client() as client:
        with _keys(ended), Live(screen=True, auto_refresh=False, console=display.console()) as live:
            while not ended.is_set():
                try:
                    snapshot = await take_snapshot(client)
                    rates.add(snapshot.overview)
                    shown = screen(context.shown_url, snapshot, rates, *live.console.size)
                except FairlaneError as exc:
                    # Keep running through an outage of the store.
                    shown = plain(f"cannot read the store: {exc}", "bold red")
                live.update(Group(shown, Text("q quits", style="dim")), refresh=True)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), INTERVAL)


@contextlib.contextmanager
def _keys(ended: asyncio.Event) -> Iterator[None]:
    """Set `ended` when q is pressed, and restore the terminal afterwards."""
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
