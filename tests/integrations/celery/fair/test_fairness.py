"""What fair mode is for: turns of tenants, reserved slots, and limits across workers."""

import time

import pytest

from fairlane.model.job import JobState
from tests.integrations.celery.kit import eventually
from tests.sizes import sized

from .site import Site

CROWD = sized(300, 5_000)
"""Tasks of one tenant that wait when another sends its first."""


def test_a_newcomer_waits_for_one_turn_of_each_tenant(site: Site) -> None:
    note = site.task("note")
    word = f"many-{time.time_ns()}"
    client = site.shop.fairlane.blocking
    site.task("add").delay(1, 2).get(timeout=30)
    # However slow this process is, the crowd is there before its first task starts.
    client.pause("celery")
    crowd = [note.apply_async((word, 0.02), headers={"tenant": "crowd"}).id for _ in range(CROWD)]
    client.resume("celery")
    eventually(lambda: site.shop.lines(f"begin {word}"))
    newcomer = note.apply_async((f"new-{word}", 0.02), headers={"tenant": "newcomer"})
    before = len(site.shop.lines(f"begin {word}"))
    newcomer.get(timeout=30)
    begun = [line for line in site.shop.lines("begin ") if word in line]
    assert begun.index(f"begin new-{word}") <= before + 2 + 3, "two tenants, and at most three slots"
    assert len(begun) < CROWD, "the newcomer met no crowd"
    for first in range(0, CROWD, 500):
        client.cancel(crowd[first : first + 500])

    def is_empty() -> bool:
        [queue] = [each for each in client.queues() if each.name == "celery"]
        return not sum(each.pending + each.running for each in queue.classes)

    eventually(is_empty)


@pytest.fixture
def pair(own_site: Site) -> Site:
    """Two workers with threads, the first of which has four slots, one of them reserved."""
    own_site.worker("-P", "threads", "-c", "4", "-Q", "celery,limited", ready=False)
    own_site.worker("-P", "threads", "-c", "2", "-Q", "limited", ready=False)
    for worker in own_site.workers:
        worker.ready()
    return own_site


def test_slots_and_limits(pair: Site) -> None:
    note = pair.task("note")
    ordinary = [pair.task("wait").delay(f"ordinary{n}") for n in range(4)]
    eventually(lambda: len(pair.shop.lines("begin ordinary")) == 3)
    assert note.apply_async(("urgent",), fairlane_priority="high").get(timeout=30) == "urgent"
    order = pair.shop.lines()
    assert "begin ordinary3" not in order[: order.index("begin urgent")]
    # A limit of one for the queue, on both workers together.
    limited = [note.apply_async(("single", 0.05), queue="limited") for _ in range(8)]
    pair.shop.open_gate()
    for result in [*limited, *ordinary]:
        result.get(timeout=120)
    steps = [line.partition(" ")[0] for line in pair.shop.lines() if line.endswith(" single")]
    assert steps == ["begin", "end"] * 8
    states = {pair.ended(result.id).state for result in limited}
    assert states == {JobState.COMPLETED}
