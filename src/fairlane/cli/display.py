"""Formats output: tables and relative times for people, one JSON document for programs.

Lanes, names and errors come from users and are printed as plain text: markup in them has no effect, and control
characters, which could move the cursor or change colours, are escaped.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import click
import msgspec
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ..runtime.logs import escaped

if TYPE_CHECKING:
    from ..store.diagnosis import Finding

WIDE = 400
"""Columns where standard output is not a terminal: a program that reads it needs every id whole, on one line."""

STATE_STYLES = {
    "scheduled": "cyan",
    "pending": "yellow",
    "running": "bright_blue",
    "completed": "green",
    "failed": "bold red",
    "cancelled": "magenta",
    "live": "green",
    "stopping": "yellow",
    "ended": "dim",
    "dead": "bold red",
    "open": "green",
    "draining": "yellow",
    "released": "dim",
    "lost": "bold red",
    "high": "bold",
    "low": "dim",
    "ok": "green",
    "warn": "yellow",
    "error": "bold red",
}


def console() -> Console:
    """A console on the current standard output, with room for long lines if that is not a terminal."""
    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(highlight=False, width=WIDE)


def plain(value: object, style: str = "", *, most: int | None = None) -> Text:
    """A value as text that is safe to print; None is a dash. `most` is the length at which it is cut."""
    if value is None or value == "":
        return Text("–", style="dim")
    text = escaped(str(value))
    if most is not None and len(text) > most:
        text = text[: most - 1] + "…"
    return Text(text, style=style)


def state_text(value: object) -> Text:
    """A state or a priority in its colour."""
    text = str(value)
    return Text(text, style=STATE_STYLES.get(text, ""))


def number(value: int | None, style: str = "", *, exact: bool = True) -> Text:
    """A count. A zero is dimmed, and an estimate has a tilde."""
    if value is None:
        return plain(None)
    return Text(f"{'' if exact else '~'}{value:,}", style=style if value else "dim")


def duration(seconds: float | None) -> str:
    """A duration in the unit that fits."""
    if seconds is None:
        return "–"
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    for unit, size in (("s", 1), ("min", 60), ("h", 3_600)):
        # Up to 120 s, 120 min and 48 h: less than two of the next unit would round too coarsely.
        if seconds < size * (48 if unit == "h" else 120):
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} days"


def ago(at: float | None, now: float | None = None) -> str:
    """A time relative to now."""
    if at is None:
        return "–"
    passed = (time.time() if now is None else now) - at
    return f"in {duration(-passed)}" if passed < -0.5 else f"{duration(max(0.0, passed))} ago"


def table(
    columns: Sequence[str], rows: Iterable[Sequence[RenderableType]], *, title: str | None = None, head: bool = True
) -> Table:
    """A table whose cells wrap instead of being cut.

    A column whose name begins with ``|`` or ``>`` is never wrapped, for values that people copy or compare; ``>`` also
    aligns it to the right.
    """
    made = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    made.show_header = head
    for column in columns:
        sign = column[:1] if column[:1] in (">", "|") else ""
        justify: Literal["left", "right"] = "right" if sign == ">" else "left"
        made.add_column(column.removeprefix(sign), justify=justify, overflow="fold", no_wrap=bool(sign))
    for row in rows:
        made.add_row(*row)
    return made


def findings(found: Iterable[Finding]) -> Table:
    """What a diagnosis found, each with its advice."""
    rows = []
    for finding in found:
        text = plain(finding.what)
        if finding.advice:
            text += Text("\n→ ", style="dim") + plain(finding.advice, "dim")
        rows.append((state_text(finding.level.value), plain(finding.topic), text))
    return table(("", "", ""), rows, head=False)


def empty(what: str, store: str, hint: str = "", *, style: str = "dim") -> Text:
    """An empty result. It names the store, which may not be the one that the user had in mind."""
    return plain(f"{what} in {store}" + (f"; {hint}" if hint else ""), style)


def fields(pairs: Iterable[tuple[str, RenderableType]]) -> Table:
    """Names and values, one pair per row."""
    made = Table.grid(padding=(0, 2))
    made.add_column(style="dim")
    made.add_column(overflow="fold")
    for name, value in pairs:
        made.add_row(name, value)
    return made


def show(*renderables: RenderableType) -> None:
    """Print for people."""
    output = console()
    if output.is_terminal:
        output.print(*renderables, sep="\n")
        return
    # A program may read this: strip the padding of tables.
    with output.capture() as capture:
        output.print(*renderables, sep="\n")
    click.echo("\n".join(line.rstrip() for line in capture.get().rstrip("\n").split("\n")))


def show_json(document: Any) -> None:
    """Print one JSON document."""
    click.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())


def terminal_height() -> int:
    """The number of rows of the terminal."""
    return shutil.get_terminal_size((120, 40)).lines


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A progress bar on standard error, if that is a terminal. Yields a function to call with the size of each step."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    error = error_console()
    with Progress(*columns, console=error, transient=True, disable=not error.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda step: bar.advance(task, step)


def error_console() -> Console:
    """A console on standard error, for everything that is not the result of a command."""
    return Console(stderr=True, highlight=False)
