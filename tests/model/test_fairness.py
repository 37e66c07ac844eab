"""Fair order between lanes, shown on a small model of a domain that starts one job at a time.

The model does what every store does, with the formulas of `fairlane.model.fairness`: pick the lowest (tag, arrival),
move the clock, charge the lane.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.model.fairness import SCALE, charge, refund, tag
from fairlane.model.names import HIGHEST_FACTOR, LOWEST_FACTOR

factors = st.floats(LOWEST_FACTOR, HIGHEST_FACTOR)


@dataclass
class Flow:
    """A lane in a domain: its finish time, and its waiting jobs as (arrival, cost)."""

    weight: float = 1.0
    finish: int = 0
    blocked: bool = False
    waiting: deque[tuple[int, float]] = field(default_factory=deque)


class Domain:
    """Lanes that share a queue."""

    def __init__(self, weights: dict[str, float] | None = None) -> None:
        self.clock = 0
        self.flows = {name: Flow(weight) for name, weight in (weights or {}).items()}
        self._arrivals = 0

    def enqueue(self, lane: str, costs: Iterable[float] = (1.0,)) -> None:
        flow = self.flows.setdefault(lane, Flow())
        for cost in costs:
            self._arrivals += 1
            flow.waiting.append((self._arrivals, cost))

    def active(self) -> list[str]:
        return [name for name, flow in self.flows.items() if flow.waiting and not flow.blocked]

    def start(self) -> str | None:
        """Start the next job. Returns its lane."""
        active = self.active()
        if not active:
            return None
        lane = min(active, key=lambda name: (self._tag(name), self.flows[name].waiting[0][0]))
        flow, start = self.flows[lane], self._tag(lane)
        self.clock = max(self.clock, start)
        flow.finish = start + charge(flow.waiting.popleft()[1], flow.weight)
        return lane

    def hand_back(self, lane: str, arrival: int, cost: float) -> None:
        """A started job returns to the head of its lane."""
        flow = self.flows[lane]
        flow.finish = refund(flow.finish, charge(cost, flow.weight))
        flow.waiting.appendleft((arrival, cost))

    def run(self, count: int) -> Counter[str]:
        return Counter(lane for _ in range(count) if (lane := self.start()) is not None)

    def _tag(self, lane: str) -> int:
        return tag(self.clock, self.flows[lane].finish)


def jain(shares: Iterable[float]) -> float:
    """1 when all shares are equal, 1/n when one has everything."""
    values = list(shares)
    return sum(values) ** 2 / (len(values) * sum(value**2 for value in values))


lanes = st.lists(
    st.tuples(factors, st.lists(factors, min_size=1, max_size=6)),  # a weight, and the costs of its jobs
    min_size=1,
    max_size=6,
)


def filled(given_lanes: list[tuple[float, list[float]]]) -> Domain:
    domain = Domain({f"lane-{n}": weight for n, (weight, _) in enumerate(given_lanes)})
    for n, (_, costs) in enumerate(given_lanes):
        domain.enqueue(f"lane-{n}", costs)
    return domain


@given(lanes, st.integers(0, 20), factors, factors)
def test_a_newcomer_starts_within_one_turn_of_each_active_lane(
    others: list[tuple[float, list[float]]], starts: int, weight: float, cost: float
) -> None:
    domain = filled(others)
    domain.run(starts)
    ahead = len(domain.active())
    domain.flows["newcomer"] = Flow(weight)
    domain.enqueue("newcomer", [cost])
    assert domain.run(ahead + 1)["newcomer"] == 1


def test_a_newcomer_is_not_behind_a_hundred_thousand_jobs() -> None:
    domain = Domain()
    domain.enqueue("bulk", [1.0] * 100_000)
    domain.run(40)
    domain.enqueue("newcomer")
    assert [domain.start(), domain.start()].count("newcomer") == 1


@given(lanes)
def test_two_lanes_that_both_have_work_never_drift_apart(
    given_lanes: list[tuple[float, list[float]]],
) -> None:
    # The bound of start-time fair queueing: in service divided by weight, one job of each lane.
    domain = filled(given_lanes)
    largest = {name: max(charge(cost, flow.weight) for _, cost in flow.waiting) for name, flow in domain.flows.items()}
    served = dict.fromkeys(domain.flows, 0)
    backlogged = set(domain.flows)
    while lane := domain.start():
        served[lane] = domain.flows[lane].finish
        backlogged &= set(domain.active()) | {lane}
        for one, other in combinations(sorted(backlogged), 2):
            assert abs(served[one] - served[other]) <= largest[one] + largest[other]
        backlogged &= set(domain.active())


def test_ten_equal_lanes_get_equal_shares_whatever_they_dumped() -> None:
    domain = Domain()
    for n in range(10):
        domain.enqueue(f"lane-{n}", [1.0] * (500 if n else 20_000))
    shares = domain.run(1_000)
    assert len(shares) == 10
    assert jain(shares.values()) >= 0.99


def test_ten_lanes_of_jobs_of_different_cost_get_equal_service() -> None:
    domain = Domain()
    costs = {f"lane-{n}": 1.0 + n for n in range(10)}
    for lane, cost in costs.items():
        domain.enqueue(lane, [cost] * 2_000)
    shares = domain.run(2_000)
    assert jain(shares[lane] * cost for lane, cost in costs.items()) >= 0.99


def test_weights_are_shares() -> None:
    domain = Domain({"one": 1, "two": 2, "four": 4})
    for lane in domain.flows:
        domain.enqueue(lane, [1.0] * 700)
    shares = domain.run(700)
    for lane, expected in (("one", 100), ("two", 200), ("four", 400)):
        assert shares[lane] == pytest.approx(expected, rel=0.05)


def test_one_lane_alone_uses_everything() -> None:
    domain = Domain({"bulk": 0.01, "idle": 100})
    domain.enqueue("bulk", [100.0] * 50)
    assert domain.run(50) == {"bulk": 50}


@pytest.mark.parametrize("waited", ["blocked", "idle"])
def test_a_lane_that_was_away_gets_its_share_and_no_burst(waited: str) -> None:
    domain = Domain()
    for lane in ("a", "b", "away"):
        domain.enqueue(lane, [1.0] * 1_000)
    domain.run(30)
    if waited == "blocked":
        domain.flows["away"].blocked = True
    else:
        domain.flows["away"].waiting.clear()
    domain.run(600)
    domain.flows["away"].blocked = False
    domain.enqueue("away", [1.0] * 1_000)
    served = 0
    for starts in range(1, 61):
        served += domain.run(1)["away"]
        # A third of the starts, and one more at most.
        assert starts / 3 - 1 <= served <= starts / 3 + 1


def test_a_lane_that_was_away_never_gets_two_starts_in_a_row_while_others_wait() -> None:
    domain = Domain()
    for lane in ("a", "b", "away"):
        domain.enqueue(lane, [1.0] * 1_000)
    domain.flows["away"].blocked = True
    domain.run(500)
    domain.flows["away"].blocked = False
    order = [domain.start() for _ in range(30)]
    assert all(order[n : n + 2] != ["away", "away"] for n in range(30))
    assert order.count("away") == 10


def test_jobs_that_never_ran_leave_no_debt() -> None:
    domain = Domain()
    domain.enqueue("busy", [1.0] * 1_000)
    domain.enqueue("changed-its-mind", [100.0] * 10_000)
    domain.run(20)
    domain.flows["changed-its-mind"].waiting.clear()
    domain.run(200)
    domain.enqueue("changed-its-mind")
    assert domain.run(2)["changed-its-mind"] == 1


def test_a_job_handed_back_starts_next_in_its_lane_and_pays_once() -> None:
    plain, returned = Domain(), Domain()
    for domain in (plain, returned):
        for lane in ("a", "b", "c"):
            domain.enqueue(lane, [1.0] * 30)
    assert [returned.start() for _ in range(3)] == ["a", "b", "c"]
    returned.hand_back("b", 31, 1.0)
    order = [returned.start() for _ in range(87)]
    assert order[0] == "b"
    assert [plain.start() for _ in range(3)] == ["a", "b", "c"]
    assert order[1:] == [plain.start() for _ in range(86)]


@given(st.data())
def test_the_clock_never_runs_backwards(data: st.DataObject) -> None:
    domain = Domain()
    names = ["a", "b", "c"]
    started: list[tuple[str, int, float]] = []

    def enqueue(lane: str) -> None:
        domain.enqueue(lane, [data.draw(factors)])

    def start(_: str) -> None:
        heads = {name: flow.waiting[0] for name, flow in domain.flows.items() if flow.waiting}
        if lane := domain.start():
            started.append((lane, *heads[lane]))

    def give_back(_: str) -> None:
        if started:
            domain.hand_back(*started.pop())

    def forget(lane: str) -> None:
        if lane in domain.flows:
            domain.flows[lane].waiting.clear()

    def block(lane: str) -> None:
        if lane in domain.flows:
            domain.flows[lane].blocked = not domain.flows[lane].blocked

    steps: list[Callable[[str], None]] = [enqueue, enqueue, start, start, give_back, forget, block]
    for _ in range(data.draw(st.integers(0, 40))):
        before = domain.clock
        data.draw(st.sampled_from(steps))(data.draw(st.sampled_from(names)))
        assert domain.clock >= before
        assert all(flow.finish >= 0 for flow in domain.flows.values())


@given(factors, factors)
def test_a_charge_is_a_whole_number_in_proportion_to_cost_and_weight(cost: float, weight: float) -> None:
    paid = charge(cost, weight)
    assert type(paid) is int
    assert paid >= 1
    assert paid == max(1, round(SCALE * cost / weight))


def test_a_plain_job_in_a_plain_lane_is_charged_the_scale() -> None:
    assert charge(1.0, 1.0) == SCALE
    assert charge(LOWEST_FACTOR, HIGHEST_FACTOR) == 1
    assert charge(HIGHEST_FACTOR, LOWEST_FACTOR) == 10_000 * SCALE


@given(st.integers(0, 10**12), st.integers(1, 10**12))
def test_a_lane_may_be_forgotten_exactly_when_the_clock_has_passed_its_finish(clock: int, finish: int) -> None:
    assert (tag(clock, finish) == tag(clock, 0)) == (clock >= finish)


@given(st.integers(0, 10**12), st.integers(1, 10**9), st.integers(0, 10**12))
def test_what_is_refunded_is_what_was_paid(finish: int, paid: int, clock: int) -> None:
    assert refund(finish + paid, paid) == finish
    assert refund(0, paid) == 0
    assert tag(clock, refund(finish, paid)) >= clock
