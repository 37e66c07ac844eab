"""The command ``demo``: shows what Fairlane does, with real workers on a temporary store.

On a terminal it is a live screen, elsewhere the same story as lines of text. All numbers are measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

import click
import msgspec
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ... import event_loops
from ...errors import FairlaneError
from ...model.reading import LaneReading
from ...model.session import Session
from .. import display
from ..command import Command
from ..display import duration, plain
from ..overview import slot_bar

if TYPE_CHECKING:
    from ...handle import Handle
    from .fleet import Fleet
    from .story import Story

FRAME = 0.2
SENTENCES, FEW_SENTENCES = 6, 3
"""Sentences shown on a tall terminal, and on a short one."""
TALL_TERMINAL = 34
LONGEST_LANE = 300
NUMBERS_WIDTH = 68
"""Columns of the lane table beside its bars."""
FAREWELL = """\
This was Fairlane: real processes, one SQLite file, no server.

  fairlane worker -A module:app     run your own tasks
  fairlane top                      watch them
  fairlane doctor                   look for problems"""


@click.command("demo", cls=Command)
@click.option("--once", is_flag=True, help="Run one round and exit.")
@click.option("--seconds", type=float, help="Stop after this many seconds.")
@click.option("--dashboard", is_flag=True, help="Show it in the browser: serve the dashboard and print its address.")
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=8_000,
    show_default=True,
    help="The port of the dashboard; 0 picks a free one.",
)
def demo_command(once: bool, seconds: float | None, dashboard: bool, port: int) -> None:
    """See it work: fair lanes, places in line, urgent jobs, and a worker that is killed."""
    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        event_loops.run(_show(once, seconds, port if dashboard else None))
    click.echo(FAREWELL)


async def _show(once: bool, seconds: float | None, port: int | None) -> None:
    from . import application
    from .fleet import Fleet
    from .story import Story

    fleet = Fleet()
    application.app.settings = msgspec.structs.replace(application.app.settings, url=fleet.url)
    output: Output = LiveScreen() if sys.stdout.isatty() and port is None else PlainOutput()
    if port is not None:
        output = _web_output(port)
    story = Story(fleet, output.narrate)
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    watching = asyncio.ensure_future(output.watch(fleet, story))
    try:
        async with asyncio.timeout(seconds) as limit:
            await story.begin()
            await story.run_round()
            while not once:
                await story.run_round()
    except TimeoutError:
        if not limit.expired():
            raise
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        await fleet.clear()


class Output(Protocol):
    """Where the story is told."""

    def narrate(self, markup: str) -> None:
        """Tell one sentence."""

    async def watch(self, fleet: Fleet, story: Story) -> None:
        """Show the system until cancelled."""


def _web_output(port: int) -> Output:
    try:
        from .web import WebOutput
    except ModuleNotFoundError as exc:
        raise click.ClickException(f"--dashboard requires {exc.name}: pip install 'fairlane[http]'") from None
    return WebOutput(port, PlainOutput())


class PlainOutput:
    """Prints the story as lines of text."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def narrate(self, markup: str) -> None:
        """Print one sentence with the time since the start."""
        click.echo(f"{time.monotonic() - self._began:5.1f} s  {Text.from_markup(markup).plain}")

    async def watch(self, fleet: Fleet, story: Story) -> None:
        """Nothing to draw."""


class LiveScreen:
    """Draws the story with a live view of lanes, workers and the jobs that wait for the model."""

    def __init__(self) -> None:
        self._most = SENTENCES if display.terminal_height() >= TALL_TERMINAL else FEW_SENTENCES
        self._sentences: deque[str] = deque(maxlen=self._most)

    def narrate(self, markup: str) -> None:
        """Add a sentence; the oldest one is dropped."""
        self._sentences.append(markup)

    async def watch(self, fleet: Fleet, story: Story) -> None:
        """Redraw until cancelled."""
        view = LiveView(story)
        console = display.console()
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                with contextlib.suppress(FairlaneError):
                    await view.refresh(fleet)
                live.update(Group(self._narration(story), view.draw()), refresh=True)
                await asyncio.sleep(FRAME)

    def _narration(self, story: Story) -> RenderableType:
        sentences = Table.grid(padding=(0, 1))
        for number, markup in enumerate(self._sentences, start=1):
            last = number == len(self._sentences)
            sentences.add_row("▶" if last else " ", Text.from_markup(markup, style="" if last else "dim"))
        title = Text("fairlane demo", style="bold") + Text(
            f" · round {max(1, story.round)} · Ctrl-C quits", style="dim"
        )
        # A fixed height, so that the tables below do not move.
        return Panel(
            sentences,
            title=title,
            title_align="left",
            border_style="green",
            height=min(2 * SENTENCES, 2 * self._most + 2),
        )


class LiveView:
    """The tables below the story."""

    def __init__(self, story: Story) -> None:
        self._story = story
        self._lanes: dict[str, LaneReading] = {}
        self._workers: list[Session] = []
        self._model_requests: list[tuple[str, str]] = []

    async def refresh(self, fleet: Fleet) -> None:
        """Read the store."""
        from .application import app

        self._workers = await fleet.workers()
        if self._story.people:
            self._lanes = {lane.lane: lane for lane in await app.client.lanes("pictures") if lane.lane is not None}
        self._model_requests = [
            (name, await _status_for(handle)) for name, handle in self._story.model_requests.items()
        ]

    def draw(self) -> RenderableType:
        """Draw lanes, workers, and the requests to the model."""
        beside = Table.grid(expand=True, padding=(0, 2))
        beside.add_column(ratio=1)
        beside.add_column(ratio=1)
        beside.add_row(self._draw_workers(), self._draw_model_requests())
        return Group(self._draw_lanes(), beside)

    def _draw_lanes(self) -> RenderableType:
        width = display.console().width
        scale = -(-LONGEST_LANE // max(10, width - NUMBERS_WIDTH))
        rows = []
        for person in self._story.people.values():
            lane = self._lanes.get(f"user:{person.name}")
            pending, running = (lane.pending, lane.running) if lane is not None else (0, 0)
            bar = Text("█" * running, style="bright_blue")
            bar.append("▪" * -(-pending // scale), style="yellow")
            rows.append(
                (
                    plain(person.name, "bold"),
                    bar,
                    display.number(pending, "yellow"),
                    display.number(running, "bright_blue"),
                    display.number(person.sent - pending - running, "green"),
                    Text(duration(person.waited), style="bold green")
                    if person.waited is not None
                    else Text("–", "dim"),
                )
            )
        columns = ("|lane", "|█ running ▪ waiting", ">waiting", ">running", ">done", ">started after")
        return display.table(columns, rows)

    def _draw_workers(self) -> RenderableType:
        rows = [
            (
                plain(worker.worker, "bold"),
                slot_bar(worker),
                Text(str(worker.pid), style="dim"),
                Text("silent", style="bold red") if worker.remaining < 1.0 else Text("alive", style="green"),
            )
            for worker in self._workers
        ]
        return display.table(("|worker", "|slots ▫ kept", ">pid", "|"), rows)

    def _draw_model_requests(self) -> RenderableType:
        rows = [(plain(name, "bold"), plain(why)) for name, why in self._model_requests]
        return display.table(("asks flux", "status"), rows)


async def _status_for(handle: Handle[str]) -> str:
    """The status that an application would show to a waiting user."""
    position = await handle.position()
    if position is None:
        return {"running": "flux is answering you", "completed": "answered"}.get(await handle.state(), "…")
    eta = "" if position.eta is None else f", in about {duration(position.eta)}"
    return f"you are next{eta}" if position.ahead == 0 else f"{position.ahead} ahead of you{eta}"
