"""Fairlane and other queues for Python on one PostgreSQL server, beside the bare loop in the same run.

Every side has databases of its own and runs in processes of its own, as its documentation starts it; what was set
differently is part of its name or said at the start. Jobs are coroutines that do nothing. A drain ends when the end of
every job is in the database: some sides run bodies faster than they record their ends. Every job must have run, and
only once. Sides take turns case by case, every other round in the opposite order, and each ratio is taken within a
round: the machine may be another one a minute later.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

from .figures import Figure, ratio
from .postgresql_cases import Cases, Flow
from .postgresql_server import Server, binaries
from .postgresql_side import BATCH, SIDES, side
from .workload import Run

OWN = ("fairlane", "bare")
"""The sides that are always measured; all others are peers."""
CASES = ("drain", "enqueue", "bulk", "latency")
LATENCIES = 200


@dataclass(frozen=True)
class Options:
    """What was asked for on the command line."""

    server: str = "wheel"
    peers: tuple[str, ...] | None = None
    """None: those that are installed."""
    cases: tuple[str, ...] = CASES
    rounds: int = 3
    jobs: int = 20_000
    own: tuple[str, ...] = OWN
    pin: float = 180.0
    """For how many seconds a transaction is held open."""


class Samples:
    """What was measured, by case and by who, in the order of the rounds."""

    def __init__(self) -> None:
        self._taken: dict[tuple[str, str, bool], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def add(self, case: str, unit: str, who: str, value: float, *, more: bool = False) -> None:
        """One value; `more` says that more is better."""
        self._taken[case, unit, more][who].append(value)

    def add_flow(self, case: str, who: str, flow: Flow, client: str) -> None:
        """The three values of a flow."""
        self.add(case, "jobs/s", who, flow.rate, more=True)
        self.add(f"{case}: CPU of {client}", "ms/1,000 jobs", who, flow.client * 1e6)
        self.add(f"{case}: CPU of server", "ms/1,000 jobs", who, flow.server * 1e6)

    def figures(self, peers: set[str]) -> Iterator[Figure]:
        """Medians, each with its ratio to the best peer's."""
        for (case, unit, more), sides in self._taken.items():
            best = min(
                (who for who in sides if who in peers),
                key=lambda who: median(sides[who]) * (-1 if more else 1),
                default=None,
            )
            for who, values in sides.items():
                yield Figure(
                    bench="postgresql",
                    case=f"{case}: {who}",
                    value=median(values),
                    unit=unit,
                    ratio=None if best is None or not median(sides[best]) else ratio(values, sides[best]),
                    against=best or "",
                )


@contextmanager
def started(run: Run, options: Options) -> Iterator[Server]:
    """A server of the benchmark's own."""
    server = Server(binaries(options.server), run.directory)
    server.start()
    print(f"PostgreSQL {server.version} with its default settings (fsync on)", file=sys.stderr, flush=True)
    try:
        yield server
    finally:
        server.stop()


async def run(run: Run, options: Options) -> list[Figure]:
    """Interleave the sides, round by round."""
    samples = Samples()
    jobs = options.jobs // 10 if run.quick else options.jobs
    peers: set[str] = set()
    with started(run, options) as server:
        contestants = [
            Cases(server, name, side(name), setting) for name in chosen(options) for setting in side(name).settings
        ]
        for each in contestants:
            if each.name not in OWN:
                peers |= {each.title, each.name}
            told = f"{each.title}: {each.side.package} {each.side.version}, {each.side.settings[each.setting]}"
            print(told + (f"; {each.side.share:g} of the jobs" if each.side.share < 1 else ""), file=sys.stderr)
        senders = [
            Cases(server, name, side(name), setting) for name in chosen(options) for setting in side(name).sending
        ]
        for number in range(options.rounds):
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
            for case in options.cases:
                sides = contestants if case in ("drain", "latency") else senders
                for each in sides if number % 2 == 0 else reversed(sides):
                    await MEASURES[case](each, max(100, round(jobs * each.side.share)), samples)
    return list(samples.figures(peers))


def chosen(options: Options) -> list[str]:
    """Names of the sides, ourselves first. A peer that was asked for by name must be installed."""
    if options.peers is None:
        peers = [name for name in SIDES if name not in OWN and side(name).version is not None]
    else:
        peers = list(options.peers)
        for name in peers:
            if side(name).version is None:
                raise SystemExit(f"{name} is not installed: pip install {side(name).package}")
    return [*options.own, *(name for name in peers if name not in options.own)]


async def _drained(cases: Cases, jobs: int, samples: Samples) -> None:
    for workers, title in ((1, "drain, 1 worker"), (2, "drain, 2 workers")):
        samples.add_flow(title, cases.title, await cases.drain(jobs, workers), "workers")


async def _waited(cases: Cases, _jobs: int, samples: Samples) -> None:
    if cases.side.waits:
        middle, worst = await cases.latency(LATENCIES)
        samples.add("idle, enqueue to start: median", "ms", cases.title, middle * 1e3)
        samples.add("idle, enqueue to start: p99", "ms", cases.title, worst * 1e3)


async def _sent(cases: Cases, jobs: int, samples: Samples) -> None:
    samples.add_flow("enqueue one by one", cases.title, await cases.send(jobs // 10), "sender")


async def _loaded(cases: Cases, jobs: int, samples: Samples) -> None:
    for kind, batch in (("1,000 a call", BATCH), ("all in one call", jobs)):
        samples.add_flow(f"enqueue in bulk, {kind}", cases.title, await cases.load(jobs, batch), "sender")


MEASURES = {"drain": _drained, "enqueue": _sent, "bulk": _loaded, "latency": _waited}
