"""The command ``demo``: shows what Fairlane is about, with real workers on a temporary store.

On a terminal it is a live screen, elsewhere the same story line by line, with the same measured numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections import deque
from typing import TYPE_CHECKING

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
    from .play import Play
    from .stage import Stage

FRAME = 0.2
TOLD, TOLD_IN_SHORT = 6, 3
"""Sentences on a screen that has room for everything, and on a small one."""
ROOM_FOR_ALL = 34
LONGEST_LANE = 300
ROOM_FOR_NUMBERS = 68
"""Columns that the rest of the table of lanes needs beside its bars."""
FAREWELL = """\
That was Fairlane: real processes, one SQLite file, no server.

  fairlane worker -A module:app     run your own tasks
  fairlane top                      watch them
  fairlane doctor                   see whether all is well"""


@click.command("demo", cls=Command)
@click.option("--once", is_flag=True, help="Play once and exit.")
@click.option("--seconds", type=float, help="End after this many seconds.")
def demo_command(once: bool, seconds: float | None) -> None:
    """See what it is about: fair lanes, places in line, urgent work, and a worker that is killed."""
    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        event_loops.run(_show(once, seconds))
    click.echo(FAREWELL)


async def _show(once: bool, seconds: float | None) -> None:
    from . import scene
    from .play import Play
    from .stage import Stage

    stage = Stage()
    scene.app.settings = msgspec.structs.replace(scene.app.settings, url=stage.url)
    teller = Screen() if sys.stdout.isatty() else Lines()
    play = Play(stage, teller.say)
    told = asyncio.current_task()
    assert told is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.cancel)
    watching = asyncio.ensure_future(teller.watch(stage, play))
    try:
        async with asyncio.timeout(seconds) as limit:
            await play.begin()
            await play.play_round()
            while not once:
                await play.play_round()
    except TimeoutError:
        if not limit.expired():
            raise
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        await stage.clear()


class Lines:
    """The story for whoever reads it later."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def say(self, markup: str) -> None:
        """One sentence, with the time since the beginning."""
        click.echo(f"{time.monotonic() - self._began:5.1f} s  {Text.from_markup(markup).plain}")

    async def watch(self, stage: Stage, play: Play) -> None:
        """The sentences are all there is to see."""


class Screen:
    """The story with a live view of lanes, workers and the line before the model."""

    def __init__(self) -> None:
        self._most = TOLD if display.lines_of_terminal() >= ROOM_FOR_ALL else TOLD_IN_SHORT
        self._told: deque[str] = deque(maxlen=self._most)

    def say(self, markup: str) -> None:
        """The next sentence; the oldest goes."""
        self._told.append(markup)

    async def watch(self, stage: Stage, play: Play) -> None:
        """Draw until cancelled."""
        view = View(play)
        console = display.console()
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                with contextlib.suppress(FairlaneError):
                    await view.look(stage)
                live.update(Group(self._narration(play), view.draw()), refresh=True)
                await asyncio.sleep(FRAME)

    def _narration(self, play: Play) -> RenderableType:
        sentences = Table.grid(padding=(0, 1))
        for number, markup in enumerate(self._told, start=1):
            last = number == len(self._told)
            sentences.add_row("▶" if last else " ", Text.from_markup(markup, style="" if last else "dim"))
        title = Text("fairlane demo", style="bold") + Text(f" · round {max(1, play.round)} · Ctrl-C ends", style="dim")
        # Of one height, so that what lies below stands still.
        return Panel(
            sentences, title=title, title_align="left", border_style="green", height=min(2 * TOLD, 2 * self._most + 2)
        )


class View:
    """What is drawn below the story."""

    def __init__(self, play: Play) -> None:
        self._play = play
        self._lanes: dict[str, LaneReading] = {}
        self._workers: list[Session] = []
        self._line: list[tuple[str, str]] = []

    async def look(self, stage: Stage) -> None:
        """Read the store."""
        from .scene import app

        self._workers = await stage.workers()
        if self._play.people:
            self._lanes = {lane.lane: lane for lane in await app.client.lanes("pictures") if lane.lane is not None}
        self._line = [(name, await _told_to(handle)) for name, handle in self._play.queue_of_the_model.items()]

    def draw(self) -> RenderableType:
        """Lanes, workers, and the line."""
        beside = Table.grid(expand=True, padding=(0, 2))
        beside.add_column(ratio=1)
        beside.add_column(ratio=1)
        beside.add_row(self._draw_workers(), self._draw_line())
        return Group(self._draw_lanes(), beside)

    def _draw_lanes(self) -> RenderableType:
        width = display.console().width
        scale = -(-LONGEST_LANE // max(10, width - ROOM_FOR_NUMBERS))
        rows = []
        for person in self._play.people.values():
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

    def _draw_line(self) -> RenderableType:
        rows = [(plain(name, "bold"), plain(why)) for name, why in self._line]
        return display.table(("asks flux", "is told"), rows)


async def _told_to(handle: Handle[str]) -> str:
    """What somebody who waits for an answer is told."""
    position = await handle.position()
    if position is None:
        return {"running": "flux is answering you", "completed": "answered"}.get(await handle.state(), "…")
    eta = "" if position.eta is None else f", in about {duration(position.eta)}"
    return f"you are next{eta}" if position.ahead == 0 else f"{position.ahead} ahead of you{eta}"
