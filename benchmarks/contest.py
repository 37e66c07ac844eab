"""The contest: Fairlane, other queues and a bare loop on one server, case by case in the same run.

Every side has databases of its own and runs in processes of its own, as its documentation starts it; what was set
differently is part of its name or said at the start. Jobs do nothing. A drain ends when the end of every job is on the
server: some sides run bodies faster than they record their ends. Every job must have run, and only once. Sides take
turns case by case, every other round in the opposite order, and each ratio is taken within a round: the machine may be
another one a minute later.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from .cases import Cases, Flow, Server
from .figures import Bound, Figure, ratio
from .side import BATCH, SIDES, Side, side

OWN = ("fairlane", "bare")
"""The sides that are always measured; all others are peers."""
CASES = ("drain", "enqueue", "bulk", "latency")
LATENCIES = 200


@dataclass(frozen=True)
class Options:
    """What was asked for on the command line, for all benchmarks on servers."""

    server: str = "wheel"
    peers: tuple[str, ...] | None = None
    """None: those that are installed."""
    cases: tuple[str, ...] = CASES
    rounds: int = 3
    jobs: int = 20_000
    own: tuple[str, ...] = OWN
    pin: float = 180.0
    """For how many seconds a transaction is held open."""
    waiting: int = 100_000
    """How many jobs wait in the bigger store, where growth is measured on Redis."""
    kills: int = 30
    """How often the server is killed."""


class Samples:
    """What was measured on a kind of server, by case and by who, in the order of the rounds."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.peers: dict[str, Side] = {}
        """The other queues, without Fairlane and the bare loop, by title."""
        self._taken: dict[tuple[str, str, bool], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def add(self, case: str, unit: str, who: str, value: float, *, more: bool = False) -> None:
        """One value; `more` says that more is better."""
        self._taken[case, unit, more][who].append(value)

    def add_flow(self, case: str, who: str, flow: Flow, client: str) -> None:
        """The values of a flow."""
        self.add(case, "jobs/s", who, flow.rate, more=True)
        self.add(f"{case}: CPU of {client}", "ms/1,000 jobs", who, flow.client * 1e6)
        self.add(f"{case}: CPU of server", "ms/1,000 jobs", who, flow.server * 1e6)
        self.add(f"{case}: CPU of both", "ms/1,000 jobs", who, (flow.client + flow.server) * 1e6)

    def figures(self) -> Iterator[Figure]:
        """Medians, each with its ratio to the best peer's."""
        for (case, unit, _), sides in self._taken.items():
            best = self.best(case, set(self.peers))
            for who, values in sides.items():
                yield Figure(
                    bench=self.kind,
                    case=f"{case}: {who}",
                    value=median(values),
                    unit=unit,
                    ratio=None if best is None or not median(sides[best]) else ratio(values, sides[best]),
                    against=best or "",
                )

    def best(self, case: str, among: set[str]) -> str | None:
        """Who did best; None if none of them was measured."""
        for (found, _, more), sides in self._taken.items():
            if found == case:
                able = [who for who in sides if who in among]
                return min(able, key=lambda who: median(sides[who]) * (-1 if more else 1), default=None)
        return None

    def values(self, case: str, who: str) -> list[float]:
        """What was measured; nothing if it was not."""
        return [value for (found, _, _), sides in self._taken.items() if found == case for value in sides.get(who, ())]

    def demand(self, case: str, who: str, against: tuple[str, str | None], bound: Bound) -> Iterator[Figure]:
        """A ratio that must keep a bound, to another side's values in a case; empty if either is missing."""
        other, whose = against
        mine, theirs = self.values(case, who), [] if whose is None else self.values(other, whose)
        if mine and theirs:
            name = whose if other == case else f"{whose}, {other}"
            yield Figure(
                bench=self.kind,
                case=f"must hold: {case}: {who}",
                value=median(mine),
                unit=next(unit for found, unit, _ in self._taken if found == case),
                ratio=ratio(mine, theirs),
                against=name or "",
                bound=bound,
            )


async def hold(kind: str, server: Server, options: Options, *, quick: bool) -> Samples:
    """Interleave the sides, round by round."""
    samples = Samples(kind)
    jobs = options.jobs // 10 if quick else options.jobs
    contestants, senders = [], []
    for name in chosen(kind, options):
        found = side(kind, name)
        contestants += [Cases(server, kind, name, found, setting) for setting in found.settings]
        senders += [Cases(server, kind, name, found, setting) for setting in found.sending]
    for each in contestants:
        if each.name not in OWN:
            samples.peers |= {each.title: each.side, each.name: each.side}
        told = f"{each.title}: {each.side.package} {each.side.version}, {each.side.settings[each.setting]}"
        print(told + (f"; {each.side.share:g} of the jobs" if each.side.share < 1 else ""), file=sys.stderr)
    for number in range(options.rounds):
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
        for case in options.cases:
            sides = contestants if case in ("drain", "latency") else senders
            for each in sides if number % 2 == 0 else reversed(sides):
                await MEASURES[case](each, max(100, round(jobs * each.side.share)), samples)
    return samples


def chosen(kind: str, options: Options) -> list[str]:
    """Names of the sides, ourselves first. A peer that was asked for by name must be installed."""
    if options.peers is None:
        peers = [name for name in SIDES[kind] if name not in OWN and side(kind, name).version is not None]
    else:
        peers = list(options.peers)
        for name in peers:
            if side(kind, name).version is None:
                raise SystemExit(f"{name} is not installed: pip install {side(kind, name).package}")
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
    samples.add_flow("enqueue one by one", cases.title, await cases.send(max(500, jobs // 10)), "sender")


async def _loaded(cases: Cases, jobs: int, samples: Samples) -> None:
    for kind, batch in (("1,000 a call", BATCH), ("all in one call", jobs)):
        samples.add_flow(f"enqueue in bulk, {kind}", cases.title, await cases.load(jobs, batch), "sender")


MEASURES = {"drain": _drained, "enqueue": _sent, "bulk": _loaded, "latency": _waited}
