"""Sticky plans on real Celery workers: where tasks run, what a release does, and who gets a broadcast."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from celery import chain
from celery.exceptions import WorkerLostError

from fairlane.errors import InvalidInput
from fairlane.model.binding import BindingState, Release
from fairlane.model.job import JobState
from tests.integrations.celery.kit import eventually
from tests.sizes import sized

from .site import Site, direct

WAIT = 40


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Workers 0, 1 and 2 of the pool."""
    made = Site(tmp_path_factory.mktemp("sticky"))
    try:
        made.workers(0, 1, 2)
        yield made
    finally:
        made.close()


@pytest.fixture
def site(shared: Site) -> Iterator[Site]:
    """The shared workers without a bound key."""
    yield shared
    shared.release_all()


@pytest.mark.parametrize("_again", range(sized(1, 10)))
def test_sc_09_first_of_the_least_loaded(site: Site, _again: int) -> None:
    where, prepare = site.task("where"), site.task("prepare_task")

    def names() -> set[str]:
        return {queue.name for queue in site.plans.fairlane.blocking.queues()}

    before = names()
    queues = [site.router.enqueue(where, key=plan).get(timeout=WAIT) for plan in "ABCD"]
    assert queues == [direct(0), direct(1), direct(2), direct(0)]
    for _ in range(5):
        queue, compute = site.router.enqueue(prepare.s("A"), key="A").get(timeout=WAIT)
        assert queue == direct(0)
        assert site.plans.app.AsyncResult(compute).get(timeout=WAIT) == direct(0)
        # The step that was sent to the queue of the first one belongs to the plan too.
        assert site.job(compute).sticky == "A"
    # Another test may have had a worker 3.
    assert names() - before <= {direct(0), direct(1), direct(2)}
    assert site.loads() == {0: ["A", "D"], 1: ["B"], 2: ["C"]}


@contextmanager
def sampling(site: Site) -> Iterator[Callable[[], int]]:
    """Read the bindings all the time. Yields a function that returns how many a key had at most, at one reading."""
    seen = [0]
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            keys = Counter(binding.key for binding in site.router.bindings())
            seen[0] = max(seen[0], *keys.values(), 0)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield lambda: seen[0]
    finally:
        over.set()
        thread.join()


def test_sc_10_release_history_and_binding_again(site: Site) -> None:
    where, delete = site.task("where"), site.task("delete_pod")
    with sampling(site) as most:
        _sc_10(site, where, delete)
    assert most() == 1, "a plan had two open rows"


def _sc_10(site: Site, where: Any, delete: Any) -> None:
    for plan in "ABCD":
        site.router.enqueue(where, key=plan).get(timeout=WAIT)
    before = {binding.key: binding for binding in site.router.bindings()}
    past = len(site.router.history("A")) - 1
    assert site.router.release("A", cleanup=delete.si("A")) is Release.DRAINING
    eventually(lambda: site.router.history("A")[-1].state is BindingState.RELEASED)
    closed = site.router.history("A")[-1]
    assert closed.closed_at is not None
    # A second release of the closed row changes nothing.
    assert site.router.release("A", cleanup=delete.si("A")) is Release.NOTHING
    assert site.router.history("A")[-1] == closed
    after = {binding.key: (binding.index, binding.opened_at) for binding in site.router.bindings()}
    assert after == {key: (b.index, b.opened_at) for key, b in before.items() if key != "A"}

    assert site.router.enqueue(where, key="A").get(timeout=WAIT) == direct(0)
    rows = site.router.history("A")[past:]
    assert [row.state for row in rows] == [BindingState.RELEASED, BindingState.OPEN]
    assert rows[0] == closed


def test_sc_11_a_cleanup_without_a_binding_and_three_at_once(site: Site) -> None:
    where, delete = site.task("where"), site.task("delete_pod")
    nothing = site.router.releases[Release.NOTHING]
    assert site.router.release("never", cleanup=delete.si("never")) is Release.NOTHING
    assert site.router.releases[Release.NOTHING] == nothing + 1

    plan = "thrice"
    site.router.enqueue(where, key=plan).get(timeout=WAIT)
    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(lambda _: site.router.release(plan, cleanup=delete.si(plan)), range(3)))
    assert Release.DRAINING in answers
    eventually(lambda: site.router.history(plan)[-1].state is BindingState.RELEASED)
    assert site.plans.lines(f"deleted {plan}") == [f"deleted {plan} {direct(0)}"]
    assert len(site.router.history(plan)) == 1
    assert site.plans.lines("deleted never") == []


def test_a_cleanup_waits_for_the_last_task(site: Site) -> None:
    """A task that was sent before the release runs first, and on the same worker."""
    compute, delete = site.task("compute_task"), site.task("delete_pod")
    plan = "late"
    running = site.router.enqueue(compute, (plan, 30), key=plan)
    eventually(lambda: site.plans.lines(f"compute {plan}"))
    assert site.router.release(plan, cleanup=delete.si(plan)) is Release.DRAINING
    assert site.plans.lines(f"deleted {plan}") == []
    site.go(plan)
    queue = running.get(timeout=WAIT)
    eventually(lambda: site.plans.lines(f"deleted {plan}"))
    assert site.plans.lines(f"deleted {plan}") == [f"deleted {plan} {queue}"]


def test_a_chain_and_a_retry_stay_with_the_plan(site: Site) -> None:
    where, again = site.task("where"), site.task("again")
    site.router.enqueue(where, key="first").get(timeout=WAIT)
    result = site.router.enqueue(chain(where.si(), where.s(), where.s()), key="second")
    assert result.get(timeout=WAIT) == direct(1)
    assert site.job(result.id).sticky == site.job(result.parent.id).sticky == "second"
    assert site.router.enqueue(again, key="second").get(timeout=WAIT) == [direct(1), 1]


def test_two_first_tasks_at_once_bind_one_worker(site: Site) -> None:
    where = site.task("where")
    with ThreadPoolExecutor(8) as threads:
        sent = list(threads.map(lambda _: site.router.enqueue(where, key="raced"), range(8)))
    assert {result.get(timeout=WAIT) for result in sent} == {direct(0)}
    assert len(site.router.history("raced")) == 1


def test_sc_12_broadcast_generic_and_direct(site: Site) -> None:
    buffer, db, where = (
        site.task(f"{name}") for name in ("remove_models_from_buffer", "remove_models_from_db", "where")
    )
    everywhere = site.router.broadcast(buffer.s("one"), ttl=120)
    routed = buffer.delay("two")  # by its route
    generic = db.delay("three")
    assert where.apply_async(queue=direct(2)).get(timeout=WAIT) == direct(2)
    assert everywhere.wait(WAIT) == dict.fromkeys(range(3), JobState.COMPLETED)
    assert generic.get(timeout=WAIT) == "org.worker"
    assert routed.get(timeout=WAIT) == "org.broadcast"
    eventually(lambda: len(site.plans.lines("buffer two")) == 3)
    assert sorted(site.plans.lines("buffer one")) == [f"buffer one w{index}@test" for index in range(3)]
    assert len(site.plans.lines("db three")) == 1

    [late] = site.workers(3)
    try:
        eventually(lambda: "buffer one w3@test" in site.plans.lines("buffer one"))
        eventually(lambda: "buffer two w3@test" in site.plans.lines("buffer two"))
    finally:
        assert late.stop() == 0
    [late] = site.workers(3)
    try:
        # It serves the generic queue and has nothing of the broadcast left.
        assert where.apply_async(queue=direct(3)).get(timeout=WAIT) == direct(3)
        assert len(site.plans.lines("buffer one")) == len(site.plans.lines("buffer two")) == 4
    finally:
        assert late.stop() == 0
    eventually(lambda: [session.index for session in site.router.workers()] == [0, 1, 2])


def test_invalid_publishes_store_nothing(site: Site) -> None:
    where = site.task("where")
    with pytest.raises(InvalidInput, match="fairlane_key: give either"):
        where.apply_async(queue=direct(1), fairlane_key="k")
    with pytest.raises(InvalidInput, match="fairlane_key: a broadcast"):
        where.apply_async(queue="org.broadcast", fairlane_key="k")
    with pytest.raises(InvalidInput, match="delay"):
        where.apply_async(queue="org.broadcast", countdown=5)
    with pytest.raises(InvalidInput, match="cleanup"):
        site.router.release("k", cleanup=where)
    assert site.router.history("k") == []


def test_other_queues_go_to_the_broker(site: Site) -> None:
    for queue in ("scheduler", "celery"):
        id = site.task("where").apply_async(queue=queue).id
        assert site.plans.server.llen(f"{site.prefix}{queue}") == 1
        site.plans.server.delete(f"{site.prefix}{queue}")
        assert site.plans.fairlane.blocking.find(limit=500, queue=queue).jobs == ()
        assert id


RESERVING: dict[str, Any] = {"FAIRLANE_HIGH_PRIORITY_RESERVED": "1", "FAIRLANE_LEASE": "5"}


@pytest.fixture(scope="module")
def shared_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Workers 0 and 1 with a slot for high priority: an index by the name of a queue, and one by the environment."""
    made = Site(tmp_path_factory.mktemp("pair"))
    try:
        made.start("a", "-Q", f"org.worker,{direct(0)}", **RESERVING)
        yield made
    finally:
        made.close()


@pytest.fixture
def pair(shared_pair: Site) -> Iterator[Site]:
    """Both workers without a bound key. A test may kill the second one."""
    if shared_pair.started[-1].process.poll() is not None or len(shared_pair.started) == 1:
        shared_pair.start("b", "-Q", "org.worker", FAIRLANE_INDEX="1", **RESERVING)
    for worker in (shared_pair.started[0], shared_pair.started[-1]):
        worker.ready()
    shared_pair.live(0, 1)
    yield shared_pair
    shared_pair.release_all()


def test_sc_25_a_plan_waits_for_its_worker_and_high_has_its_slot(pair: Site) -> None:
    compute, where = pair.task("compute_task"), pair.task("where")
    pair.router.enqueue(where, key="other").get(timeout=WAIT)
    low: dict[str, Any] = {"fairlane_priority": "low"}
    high: dict[str, Any] = {"fairlane_priority": "high"}
    long = [pair.router.enqueue(compute, ("P", 60), key="P", **low) for _ in range(2)]
    eventually(lambda: len(pair.plans.lines("compute P")) == 2)
    pair.router.release("other")
    eventually(lambda: pair.loads() == {1: ["P"]})

    waits = pair.router.enqueue(where, key="P", **low)
    urgent = pair.router.enqueue(where, key="P", **high)
    assert pair.router.enqueue(where, key="Q", **low).get(timeout=WAIT) == direct(0)
    assert urgent.get(timeout=WAIT) == direct(1)
    job = pair.job(waits.id)
    assert (job.state, job.worker) == (JobState.PENDING, "org/1")
    pair.go("P")
    assert [each.get(timeout=WAIT) for each in [*long, waits]] == [direct(1)] * 3


def test_the_plans_of_a_worker_that_dies_move(pair: Site) -> None:
    compute, where = pair.task("compute_task"), pair.task("where")
    pair.router.enqueue(where, key="stays").get(timeout=WAIT)
    ran = pair.router.enqueue(compute, ("moves", 300), key="moves")
    eventually(lambda: pair.plans.lines("compute moves"))
    pair.started[-1].kill()
    waited = pair.router.enqueue(where, key="moves")
    with pytest.raises(WorkerLostError):
        ran.get(timeout=2 * WAIT)
    assert waited.get(timeout=WAIT) == direct(0)
    assert [row.state for row in pair.router.history("moves")] == [BindingState.LOST, BindingState.OPEN]
    assert pair.plans.lines("compute moves") == [f"compute moves {direct(1)}"]
    # A worker that is gone is not eligible, although it has the fewest keys.
    assert pair.router.enqueue(where, key="new").get(timeout=WAIT) == direct(0)
