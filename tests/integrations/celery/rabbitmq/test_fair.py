"""Fair mode on RabbitMQ: results, retries, canvas, revokes, priorities and adoption."""

import pytest
from celery import chord, states
from kombu.connection import Connection

from fairlane.model.job import JobState, Priority, Reason
from tests.integrations.celery.fair.site import Site
from tests.integrations.celery.kit import eventually

pytestmark = pytest.mark.timeout(300)  # the server takes its time to start on a busy machine


def test_results_and_lanes(site: Site) -> None:
    result = site.task("add").apply_async((1, 2), headers={"tenant": "ann"})
    assert result.get(timeout=120) == 3
    job = site.ended(result.id)
    assert (job.lane, job.queue, job.state) == ("ann", "celery", JobState.COMPLETED)


def test_retries(site: Site) -> None:
    result = site.task("again").delay(2)
    assert result.get(timeout=120) == [0, 2]
    assert [attempt.outcome for attempt in site.ended(result.id).attempts] == ["retry", "retry", "completed"]


def test_a_chord(site: Site) -> None:
    add, total = site.task("add"), site.task("total")
    assert chord([add.s(i, 1) for i in range(4)], total.s()).apply_async().get(timeout=120) == 10


def test_revokes(site: Site) -> None:
    waiting = site.task("note").apply_async(("never",), queue="quiet")
    waiting.revoke()
    job = site.ended(waiting.id)
    assert (job.state, job.reason) == (JobState.CANCELLED, Reason.BY_USER)
    running = site.task("note").delay("revoked", 60)
    eventually(lambda: site.shop.lines("begin revoked"))
    running.revoke(terminate=True)
    assert site.ended(running.id).state is JobState.CANCELLED
    eventually(lambda: running.state == states.REVOKED)


def test_nine_is_the_highest_priority(site: Site) -> None:
    def priority(number: int) -> Priority:
        return site.job(site.task("add").apply_async((1, 2), priority=number, queue="quiet").id).priority

    high, normal, low = Priority.HIGH, Priority.NORMAL, Priority.LOW
    assert [priority(number) for number in (9, 7, 6, 3, 2, 0)] == [high, high, normal, normal, low, low]


def test_messages_of_an_unchanged_producer_are_adopted(site: Site) -> None:
    plain = site.shop.plain()
    ids = [
        plain.send_task("shop.add", (n, n), headers={"tenant": "old"}, priority=8 if n else None).id for n in range(6)
    ]
    assert [site.app_result(id) for id in ids] == [2 * n for n in range(6)]
    jobs = [site.ended(id) for id in ids]
    assert {(job.lane, job.state, job.queue) for job in jobs} == {("old", JobState.COMPLETED, "celery")}
    assert [job.priority for job in jobs] == [Priority.NORMAL, *[Priority.HIGH] * 5]
    plain.close()
    with Connection(site.broker) as connection:
        eventually(lambda: connection.default_channel.queue_declare("celery", passive=True).message_count == 0)
