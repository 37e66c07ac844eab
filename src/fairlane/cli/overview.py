"""Queues, workers and the leader at one moment. ``status`` prints them once, ``top`` repeatedly."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
from rich.console import RenderableType
from rich.text import Text

from .. import documents
from ..model.reading import QueueReading
from ..model.session import Session, SessionKind, SessionState, Term
from . import display
from .display import number, plain

if TYPE_CHECKING:
    from ..client import Client

BAR = 20
"""The longest bar. With more slots, a block stands for several."""


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """Queues, sessions and the leader, read together."""

    queues: tuple[QueueReading, ...]
    sessions: tuple[Session, ...]
    """Live and stopping sessions, without those that ended or died."""
    leader: Term | None

    @property
    def workers(self) -> list[Session]:
        """The workers, by pool and index."""
        found = [session for session in self.sessions if session.kind is SessionKind.WORKER]
        return sorted(found, key=lambda worker: (worker.pool, worker.index or 0))

    def record(self) -> documents.Record:
        """The overview as a document."""
        return {
            "queues": [documents.queue_record(queue) for queue in self.queues],
            "workers": [documents.session_record(worker) for worker in self.workers],
            "leader": documents.leader_record(self.leader),
        }

    def leader_text(self) -> Text:
        """The name of the leader."""
        if self.leader is None:
            return Text("none: no worker or manager is running", style="yellow")
        known = next((session for session in self.sessions if session.id == self.leader.session), None)
        name = self.leader.session if known is None else known.worker or f"{known.kind.value} {known.host}"
        return plain(f"{name}, term {self.leader.number}")


async def read_overview(client: Client) -> Overview:
    """Read the overview from the store."""
    present = (SessionState.LIVE, SessionState.STOPPING)
    return Overview(
        queues=tuple(await client.queues()),
        sessions=tuple(session for session in await client.sessions() if session.state in present),
        leader=await client.leader(),
    )


REDIS_DOWN = "redis_down"
"""The counter of stores that have tokens."""


def token_text(counted: Mapping[str, int]) -> Text:
    """What became of tokens, and whether their servers answer."""
    names = ("pushed", "failed", "scanned", "trimmed")
    text = plain(", ".join(f"{counted.get(f'tokens_{name}', 0):,} {name}" for name in names))
    if down := counted[REDIS_DOWN]:
        text.append(f"; {down} Redis down, workers poll PostgreSQL", style="yellow")
    return text


NARROW = 120
"""Width of a terminal below which tables show only their most important columns."""


def queue_table(queues: Sequence[QueueReading], store: str, width: int | None = None) -> RenderableType:
    """Queues as a table: counts by state, and how long the oldest job has waited."""
    if not queues:
        return display.empty("no queues", store)
    cells: dict[str, Callable[[QueueReading], RenderableType]] = {
        "|queue": lambda queue: plain(queue.name, "bold"),
        ">pending": lambda queue: number(queue.counts.pending, "yellow"),
        ">oldest": oldest_text,
        ">running": lambda queue: number(queue.counts.running, "bright_blue"),
        ">scheduled": lambda queue: number(queue.counts.scheduled, "cyan"),
        ">completed": lambda queue: number(queue.counts.completed, "green"),
        ">failed": lambda queue: number(queue.counts.failed, "bold red"),
        ">cancelled": lambda queue: number(queue.counts.cancelled, "magenta"),
        ">workers": lambda queue: number(queue.workers),
        "settings": _settings,
    }
    if (width or display.console().width) < NARROW:
        for column in (">scheduled", ">completed", ">cancelled"):
            del cells[column]
        cells["settings"] = _short_settings
    return display.table(tuple(cells), [[cell(queue) for cell in cells.values()] for queue in queues])


def oldest_text(queue: QueueReading) -> Text:
    """How long the oldest waiting job has waited."""
    if queue.oldest_wait is None:
        return plain(None)
    return Text(display.duration(queue.oldest_wait), style="yellow")


def _settings(queue: QueueReading) -> Text:
    settings = queue.settings
    words = []
    if settings.limit is not None:
        words.append(f"limit {settings.limit}")
    if settings.max_pending is not None:
        words.append(f"at most {settings.max_pending} pending")
    if settings.lanes:
        words.append(f"{len(settings.lanes)} lane rules" if len(settings.lanes) > 1 else "1 lane rule")
    if queue.override is not None:
        words.append("overridden")
    text = plain(", ".join(words), "dim")
    return Text("paused ", style="bold yellow") + text if settings.paused else text


def _short_settings(queue: QueueReading) -> Text:
    """The settings that matter most: paused, or the limit."""
    settings = queue.settings
    text = plain("" if settings.limit is None else f"limit {settings.limit}", "dim")
    return Text("paused", style="bold yellow") if settings.paused else text


def worker_table(workers: Sequence[Session], store: str, width: int | None = None) -> RenderableType:
    """Workers as a table. A narrow terminal shows the most important columns."""
    if not workers:
        return display.empty("no workers", store, "start one: fairlane worker -A module:app", style="yellow")
    now = time.time()
    cells: dict[str, Callable[[Session], RenderableType]] = {
        "|worker": lambda worker: plain(worker.worker or worker.kind.value, "bold"),
        "state": lambda worker: display.state_text(worker.state.value),
        "|slots": slot_bar,
        ">used": lambda worker: Text(f"{sum(worker.running)}/{worker.slots.total if worker.slots else 0}"),
        "queues": lambda worker: plain(", ".join(worker.queues)),
        "host": lambda worker: plain(worker.host),
        ">pid": lambda worker: Text(str(worker.pid)),
        "started": lambda worker: Text(display.ago(worker.started_at, now)),
        ">lease": lease_text,
    }
    if (width or display.console().width) < NARROW:
        for column in ("host", "started"):
            del cells[column]
        cells["queues"] = lambda worker: plain(", ".join(worker.queues), most=20)
    return display.table(tuple(cells), [[cell(worker) for cell in cells.values()] for worker in workers])


def lease_text(session: Session) -> Text:
    """The rest of the lease, coloured when a renewal is late."""
    if session.state in (SessionState.ENDED, SessionState.DEAD):
        return plain(None)
    if session.remaining < 0:
        return Text(f"expired {display.duration(-session.remaining)} ago", style="bold red")
    return Text(display.duration(session.remaining), style="yellow" if session.remaining < session.lease / 3 else "dim")


def slot_bar(worker: Session) -> Text:
    """Slots as blocks: used by high, normal and low jobs, free, and reserved for high."""
    if worker.slots is None:
        return Text("")
    total = worker.slots.total
    scale = max(1.0, total / BAR)
    high, normal, low = (round(count / scale) for count in worker.running)
    kept = round(max(0, worker.slots.reserved.high - worker.running[0]) / scale)
    free = max(0, round(total / scale) - high - normal - low - kept)
    bar = Text("█" * high, style="red")
    bar.append("█" * normal, style="bright_blue")
    bar.append("█" * low, style="cyan")
    bar.append("·" * free, style="dim")
    bar.append("▫" * kept, style="red")
    return bar
