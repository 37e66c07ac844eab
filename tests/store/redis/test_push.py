"""A waiting worker is pushed the next job before it claims; a push that is lost is repeated when it does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from fairlane.errors import SessionLost
from fairlane.model.job import JobState, Priority
from fairlane.model.maintenance import Retention
from fairlane.model.session import Claim
from fairlane.model.settings import LaneRule
from fairlane.model.slots import Ask
from fairlane.model.states import complete
from fairlane.store.redis import push
from fairlane.store.redis.roles import rights
from fairlane.store.wakeups import job_topic
from tests.conformance.kit import Kit
from tests.servers import valkey

from ..idle import Idle, idle_worker, opened, sound

pytestmark = pytest.mark.anyio


@pytest.fixture
async def idle() -> AsyncIterator[Idle]:
    async with idle_worker() as idle:
        yield idle


async def test_a_job_that_is_sent_starts_at_a_worker_that_waits_before_it_asks(
    idle: Idle, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = await idle.kit.enqueue(payload=b'["for you"]', headers=b'{"and": "these"}')
    job = await idle.kit.job(id)
    assert (job.state, job.session, job.attempt) == (JobState.RUNNING, idle.worker.id, 1)
    assert await idle.notified()

    monkeypatch.setattr(idle.store, "_call", None)  # the server is not asked
    [claimed] = await idle.claim(102)
    assert (claimed.id, claimed.payload, claimed.headers, claimed.fence) == (id, b'["for you"]', b'{"and": "these"}', 1)
    await sound(idle.kit)
    verdicts = (await idle.worker.finish(complete(claimed.held))).verdicts
    assert [verdict.state for verdict in verdicts] == [JobState.COMPLETED]
    await sound(idle.kit)


async def test_a_busy_worker_is_notified_and_claims(idle: Idle) -> None:
    await idle.kit.enqueue()
    assert len(await idle.claim(102)) == 1
    assert await idle.claim(103) == []
    id = await idle.kit.enqueue()
    assert await idle.kit.state(id) is JobState.PENDING
    assert await idle.notified()
    assert [job.id for job in await idle.claim(104)] == [id]


async def test_one_job_is_sent_ahead_and_the_next_ones_wait(idle: Idle) -> None:
    ids = [await idle.kit.enqueue() for _ in range(3)]
    states = [await idle.kit.state(id) for id in ids]
    assert states == [JobState.RUNNING, JobState.PENDING, JobState.PENDING]
    assert [job.id for job in await idle.claim(102)] == ids[:1]
    assert [job.id for job in await idle.claim(103)] == ids[1:]
    await sound(idle.kit)


async def test_what_did_not_get_here_is_the_answer_to_the_claim(idle: Idle) -> None:
    id = await idle.kit.enqueue()
    # Another object of the same worker, to which nothing was sent.
    [claimed] = await idle.claim(102, store=idle.kit.store)
    assert claimed.id == id
    # And once more, if that answer is lost too. The pushed answer is not taken for the answer to another claim.
    assert [job.id for job in await idle.claim(102, store=idle.kit.store)] == [id]
    assert await idle.claim(103, store=idle.kit.store) == []


async def test_a_renewal_on_its_way_meanwhile_takes_nothing_back(idle: Idle) -> None:
    id = await idle.kit.enqueue()
    renewal = await idle.store.renew(idle.worker.id, [], claim=101)
    assert (renewal.taken_back, renewal.lost) == ((), ())
    [claimed] = await idle.claim(102)
    renewal = await idle.store.renew(idle.worker.id, [claimed.held], claim=102)
    assert (renewal.taken_back, renewal.lost) == ((), ())
    assert await idle.kit.state(id) is JobState.RUNNING


async def test_what_a_worker_never_came_for_is_taken_back_uncharged(idle: Idle) -> None:
    id = await idle.kit.enqueue()
    assert await idle.claim(103) == []
    assert (await idle.store.renew(idle.worker.id, [], claim=103)).taken_back == (id,)
    job = await idle.kit.job(id)
    assert (job.state, job.attempt) == (JobState.PENDING, 0)
    await sound(idle.kit)


async def test_a_worker_that_leaves_before_the_push_arrives_gives_the_job_back_uncharged(idle: Idle) -> None:
    id = await idle.kit.enqueue()
    await idle.store.leave(idle.worker.id, begun=[])
    job = await idle.kit.job(id)
    assert (job.state, job.attempt) == (JobState.PENDING, 0)
    await sound(idle.kit)


async def test_what_was_sent_to_a_worker_that_dies_starts_elsewhere_when_its_lease_ends(idle: Idle) -> None:
    id = await idle.kit.enqueue()
    idle.kit.clock.advance(16.0)
    rescued = await idle.kit.store.rescue(limit=100)
    assert (rescued.declared, rescued.retried) == ((idle.worker.id,), 1)
    with pytest.raises(SessionLost):
        await idle.claim(103)
    assert idle.store._pushed._sessions == {}, "the wait ends with a lost session"
    [claimed] = await (await idle.kit.worker("default")).claim(1)
    assert (claimed.id, claimed.fence, claimed.suspect) == (id, 2, True)
    await sound(idle.kit)


async def test_a_repeated_claim_that_found_nothing_is_stale_once_the_next_was_answered(idle: Idle) -> None:
    id = await idle.kit.enqueue()
    with pytest.raises(Exception, match="older than the last one"):
        await idle.claim(101)
    assert [job.id for job in await idle.claim(102)] == [id]


async def test_a_worker_that_has_not_claimed_for_seconds_gets_no_push(idle: Idle) -> None:
    idle.kit.clock.advance(2.5)
    id = await idle.kit.enqueue()
    assert await idle.kit.state(id) is JobState.PENDING
    assert await idle.notified()
    assert [job.id for job in await idle.claim(102)] == [id]


@pytest.mark.parametrize("how", ["ended", "stopping", "replaced"])
async def test_a_worker_that_is_gone_gets_no_push(idle: Idle, how: str) -> None:
    if how == "ended":
        await idle.store.leave(idle.worker.id)
    elif how == "stopping":
        await idle.store.renew(idle.worker.id, [], claim=101, stopping=True)
    else:
        await idle.kit.worker("nothing", index=idle.worker.session.index)
    assert await idle.kit.state(await idle.kit.enqueue()) is JobState.PENDING


async def test_a_worker_that_does_not_listen_gets_no_push(idle: Idle) -> None:
    # Through a store object without listeners.
    assert await idle.claim(102, store=idle.kit.store) == []
    assert await idle.kit.state(await idle.kit.enqueue()) is JobState.PENDING


async def test_a_worker_notified_of_other_work_gets_no_push_of_later_work(idle: Idle) -> None:
    """It has one slot left, and the work it was notified of is of a higher class."""
    await idle.kit.settings("default", LaneRule(pattern="*", limit=1))
    assert await idle.claim(102, 1) == []
    urgent = await idle.kit.enqueue(lane="a", priority=Priority.HIGH)
    later = await idle.kit.enqueue(queue="other", priority=Priority.LOW)
    assert [await idle.kit.state(id) for id in (urgent, later)] == [JobState.PENDING] * 2
    assert [job.id for job in await idle.claim(103, 1)] == [urgent]


async def test_a_worker_notified_of_its_own_work_gets_no_push_of_later_work(idle: Idle) -> None:
    mine = await idle.kit.enqueue(worker=idle.worker.session.index)
    later = await idle.kit.enqueue()
    assert [await idle.kit.state(id) for id in (mine, later)] == [JobState.PENDING] * 2
    assert [job.id for job in await idle.claim(102, 1)] == [mine]


@pytest.mark.parametrize("why", ["paused", "limited", "not asked for", "no room"])
async def test_what_may_not_start_is_not_sent(idle: Idle, why: str) -> None:
    if why in ("paused", "limited"):
        await idle.kit.settings("default", paused=True) if why == "paused" else await idle.kit.settings(limit=1)
        # The first job after a change of settings goes the long way. It is of another class, so that no line forms.
        await idle.kit.enqueue(priority=Priority.HIGH)
        assert len(await (await idle.kit.worker()).claim(1)) == (why == "limited")
    if why == "not asked for":
        asks = tuple(Ask("default", p, 1) for p in (Priority.HIGH, Priority.LOW))
        assert await idle.store.claim(idle.worker.id, Claim(number=102, asks=asks, total=1)) == []
    else:
        assert await idle.claim(102, 0 if why == "no room" else 10) == []
    assert await idle.kit.state(await idle.kit.enqueue()) is JobState.PENDING
    await sound(idle.kit)


async def test_a_worker_notified_of_work_it_did_not_ask_for_gets_no_push_of_later_work(idle: Idle) -> None:
    await idle.kit.enqueue(priority=Priority.LOW)
    await idle.worker.finish(*[complete(job.held) for job in await idle.claim(102)])
    asks = tuple(Ask("default", p, 1) for p in (Priority.HIGH, Priority.LOW))
    assert await idle.store.claim(idle.worker.id, Claim(number=103, asks=asks, total=1)) == []
    ids = [await idle.kit.enqueue(priority=priority) for priority in (Priority.NORMAL, Priority.LOW)]
    assert [await idle.kit.state(id) for id in ids] == [JobState.PENDING] * 2
    assert [job.id for job in await idle.claim(104, 1)] == ids[:1]


async def test_jobs_that_are_sent_ahead_go_to_one_worker_each(idle: Idle) -> None:
    second = Idle(idle.kit, idle.store, await idle.kit.worker())
    await second.seen()
    assert await second.claim(1) == []
    ids = [await idle.kit.enqueue() for _ in range(3)]
    jobs = [await idle.kit.job(id) for id in ids]
    assert [job.state for job in jobs] == [JobState.RUNNING, JobState.RUNNING, JobState.PENDING]
    assert {job.session for job in jobs[:2]} == {idle.worker.id, second.worker.id}
    assert await second.notified()
    # The hint about the third job may arrive before the job that was sent: then this claim asks the server and
    # gets both. What must hold either way: each worker gets the job it was sent, and no job goes to two.
    claimed = {second.worker.id: await second.claim(2), idle.worker.id: await idle.claim(102)}
    for job in jobs[:2]:
        assert job.session is not None
        assert job.id in {each.id for each in claimed[job.session]}
    everything = [job.id for jobs in claimed.values() for job in jobs]
    assert len(everything) == len(set(everything))
    second.subscription.close()


async def test_another_namespace_of_the_server_has_other_workers(idle: Idle) -> None:
    async with opened(valkey.server().fresh_namespace(), idle.kit.clock) as store:
        kit = Kit(store, idle.kit.clock)
        worker = await kit.worker()
        await kit.enqueue()
        [first] = await worker.claim(1)
        await worker.finish(complete(first.held))
        assert await kit.state(await kit.enqueue()) is JobState.PENDING


async def test_a_start_ahead_is_paid_for_like_any_other(idle: Idle) -> None:
    """Two jobs of the lane of those without one, and two of another: they take turns from there on."""
    first = await idle.kit.enqueue()
    assert await idle.kit.state(first) is JobState.RUNNING
    plain = [await idle.kit.enqueue() for _ in range(2)]
    lane = [await idle.kit.enqueue(lane="a") for _ in range(3)]
    await idle.claim(102)
    assert [job.id for job in await idle.claim(103)] == [lane[0], plain[0], lane[1], plain[1], lane[2]]


async def test_a_client_that_waits_for_a_job_is_notified_of_its_start(idle: Idle) -> None:
    job = idle.kit.new()
    subscription = idle.kit.store.wakeups.subscribe([job_topic(job.id)])
    await idle.kit.store.enqueue([job])
    assert await subscription.wait(10) == {job_topic(job.id)}
    subscription.close()


async def test_a_connection_that_is_lost_costs_one_look_and_is_made_again(
    idle: Idle, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = idle.store._address.namespace
    await blocked(idle)
    for line in valkey.server().ask("CLIENT", "LIST").splitlines():
        fields = dict(field.partition("=")[::2] for field in line.split())
        if fields["name"].endswith(name) and fields["cmd"] == "blpop":
            valkey.server().ask("CLIENT", "KILL", "ID", fields["id"])
    lost = await idle.kit.enqueue()
    assert [job.id for job in await idle.claim(102)] == [lost]
    await idle.worker.finish(*[complete(job.held) for job in await idle.claim(102)])
    # For a while after a failure nothing is pushed.
    assert await idle.claim(103) == []
    id = await idle.kit.enqueue()
    assert await idle.kit.state(id) is JobState.PENDING
    await idle.worker.finish(*[complete(job.held) for job in await idle.claim(104)])

    monkeypatch.setattr(push, "STEADY_SECONDS", 0.0)
    assert await idle.claim(105) == []
    await blocked(idle)
    id = await idle.kit.enqueue()
    while idle.store._pushed.take(idle.worker.id, 106) is None:
        assert await idle.notified()
    assert [job.id for job in await idle.claim(106)] == [id]


async def test_a_wait_that_timed_out_is_repeated_at_once_after_a_claim(
    idle: Idle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push, "WAIT_SECONDS", 1)
    second = Idle(idle.kit, idle.store, await idle.kit.worker("default", pool="second"))
    await second.seen()
    assert await second.claim(1) == []
    await asyncio.sleep(0.5)
    assert await second.claim(2) == []
    await asyncio.sleep(0.7)
    assert len(_waiting(idle)) == 2
    await asyncio.sleep(1.0)
    assert len(_waiting(idle)) == 1, "it has not claimed for longer than that"
    second.subscription.close()


async def test_what_came_after_a_job_that_was_sent_ahead_is_claimed_with_it(idle: Idle) -> None:
    """The worker claims because it was notified of the second job, before the push of the first arrives."""
    ids = [await idle.kit.enqueue() for _ in range(3)]
    assert [await idle.kit.state(id) for id in ids] == [JobState.RUNNING, JobState.PENDING, JobState.PENDING]
    assert [job.id for job in await idle.claim(102, 2, store=idle.kit.store)] == ids[:2]
    assert [job.id for job in await idle.claim(102, 10, store=idle.kit.store)] == ids[:2]
    assert [job.id for job in await idle.claim(103, store=idle.kit.store)] == ids[2:]
    await sound(idle.kit)


async def test_a_worker_is_woken_again_after_a_pushed_answer(idle: Idle) -> None:
    ids = [await idle.kit.enqueue() for _ in range(2)]
    while idle.store._pushed._sessions[idle.worker.id].answer is None:
        assert await idle.notified()
    assert [job.id for job in await idle.claim(102)] == ids[:1]
    await idle.subscription.wait(0.0)  # earlier notifications
    assert await idle.notified()
    assert [job.id for job in await idle.claim(103)] == ids[1:]


async def test_a_worker_that_claims_by_itself_is_not_woken_again(idle: Idle) -> None:
    await idle.kit.enqueue()
    assert await idle.notified()
    await idle.claim(102)
    assert await idle.claim(103) == []
    assert not await idle.subscription.wait(0.1)


async def test_a_process_that_is_gone_is_sent_nothing(idle: Idle) -> None:
    idle.store.wakeups.close()
    async with asyncio.timeout(30):
        channel = f"{idle.store._address.prefix}ahead:{idle.worker.id}"
        while valkey.server().ask("PUBSUB", "NUMSUB", channel)[1]:
            await asyncio.sleep(0.01)
    assert await idle.kit.state(await idle.kit.enqueue()) is JobState.PENDING


async def test_a_suspended_worker_asks_whether_its_session_still_exists(
    idle: Idle, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = await idle.kit.enqueue()
    assert await idle.notified()
    await idle.kit.store.leave(idle.worker.id, begun=[])
    monkeypatch.setattr(push, "FRESH_SECONDS", 0.0)
    with pytest.raises(SessionLost):
        await idle.claim(102)
    assert await idle.kit.state(id) is JobState.PENDING


async def test_a_queue_in_which_nothing_was_for_long_sends_ahead_too(idle: Idle) -> None:
    idle.kit.clock.advance(3_600.0)
    await idle.store.renew(idle.worker.id, [], claim=101)
    await idle.kit.store.prune(Retention())
    assert await idle.claim(102) == []
    assert await idle.kit.state(await idle.kit.enqueue()) is JobState.RUNNING
    await sound(idle.kit)


@pytest.mark.parametrize("how", ["left", "replaced"])
async def test_nothing_is_left_of_a_session_that_never_came_for_what_it_was_sent(idle: Idle, how: str) -> None:
    idle.store._pushed.forget(idle.worker.id)
    await asyncio.sleep(0.05)
    key = f"{idle.store._address.prefix}ahead:{idle.worker.id}"
    await idle.kit.enqueue()
    assert valkey.server().ask("EXISTS", key) == 1
    if how == "left":
        await idle.store.leave(idle.worker.id)
    else:
        await idle.kit.worker("nothing", index=idle.worker.session.index)
    assert valkey.server().ask("EXISTS", key) == 0


async def test_a_store_that_is_closed_waits_for_nothing(idle: Idle) -> None:
    await blocked(idle)
    before = asyncio.all_tasks()
    await idle.store.close()
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == len(before) - 1
    async with asyncio.timeout(30):
        while _waiting(idle):
            await asyncio.sleep(0.01)


async def test_a_user_without_the_right_to_block_is_notified_and_claims(idle: Idle) -> None:
    """A user whose rights were given by an older version."""
    rights_of_before = [right for right in rights("worker", idle.store._address.namespace) if right != "+blpop"]
    user = f"old-{idle.store._address.namespace}"
    valkey.server().ask("ACL", "SETUSER", user, "on", ">x", *rights_of_before)
    url = valkey.server().fresh_namespace().replace("redis://", f"redis://{user}:x@").partition("?")[0]
    async with opened(f"{url}?namespace={idle.store._address.namespace}", idle.kit.clock) as store:
        other = Idle(idle.kit, store, await idle.kit.worker())
        await idle.store.leave(idle.worker.id)
        await other.seen()
        assert await other.claim(1) == []
        async with asyncio.timeout(30):
            while store._pushed.expect(other.worker.id, 2):
                await asyncio.sleep(0.01)
        assert await other.claim(2) == []
        id = await idle.kit.enqueue()
        assert await idle.kit.state(id) is JobState.PENDING
        assert await other.notified()
        assert [job.id for job in await other.claim(3)] == [id]
        other.subscription.close()
    valkey.server().ask("ACL", "DELUSER", user)


def _waiting(idle: Idle) -> list[str]:
    mine = f":{idle.store._address.namespace} "
    lines = valkey.server().ask("CLIENT", "LIST").splitlines()
    return [line for line in lines if mine in line and " cmd=blpop " in line and " flags=b " in line]


async def blocked(idle: Idle) -> None:
    """Wait until the server knows that the worker waits."""
    async with asyncio.timeout(30):
        while not _waiting(idle):
            await asyncio.sleep(0.01)
