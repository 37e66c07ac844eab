"""Work announced by tokens: one token wakes one worker.

An idle worker blocks on the lists of its queues, for the classes of which it has room. A popped token is not a claim:
the worker then claims from PostgreSQL as always. These rules keep tokens and jobs in step:

- Nothing is popped before the claim for the last token was answered.
- A claim that took more jobs than tokens were popped removes the tokens of the others.
- A claim that found fewer jobs than tokens were popped removes the tokens that are older than it: they are stale too.
  If it ended because slots were filled, it says nothing of these tokens: they are used again, or given back.
- A token that is popped without room for its class is given back, to the end from which it is popped next.
- The blocking call is renewed when the worker has room for another class.

Whatever goes wrong here costs a poll or an empty claim. The leader's sweep adds the tokens that lack, within a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ...model.job import Claimed, JobKind, Priority
from ...model.session import Claim
from ..redis.connection import Connection
from ..redis.driver_errors import translate_connecting
from ..redis.wakeups import connector
from ..shared.subscriptions import TopicSubscription
from ..wakeups import worker_topic
from .dispatcher import SHARED_INBOX, Dispatcher
from .shard import CALL_SECONDS, CONNECT_SECONDS, LONGEST_PAUSE, SHORTEST_PAUSE, Shard

BLOCK_SECONDS = 1.0
"""How long a blocking call waits. After it, the worker looks whether a leader sweeps."""
PATIENCE = 10.0
"""By this factor polls are rarer while every server answers and a leader sweeps."""
FLUSH_SECONDS = 0.1
"""How long tokens of jobs that were claimed without them may stay: during a backlog they cause no empty claims."""

Source = tuple[str, Priority]
"""A queue and a class: what a list is for."""


class Token(NamedTuple):
    """A popped token."""

    shard: Shard
    source: Source
    value: bytes


class TokenWork:
    """Implements `fairlane.store.wakeups.Work` for one worker."""

    def __init__(
        self,
        shards: Sequence[Shard],
        queues: Iterable[str],
        on_delivery: Callable[[], None],
        dispatcher: Dispatcher,
        subscription: TopicSubscription,
        closed: Callable[[TokenWork], None],
    ) -> None:
        self.queues = tuple(queues)
        self._loop = asyncio.get_running_loop()
        self._on_delivery = on_delivery
        self._dispatcher = dispatcher
        self._subscription = subscription
        self._on_close = closed
        self._room: frozenset[Priority] = frozenset()
        self._waits = False
        self._held: list[Token] = []
        self._answering: list[Token] = []
        """Tokens for which the claim under way was made."""
        self._sent_at = 0.0
        self._claimed: Counter[Source] = Counter()
        """Jobs claimed without tokens, whose tokens are removed soon."""
        self._flusher: asyncio.TimerHandle | None = None
        self._closed = False
        self._poppers = [Popper(shard, self) for shard in shards]
        self._shard_of = {priority: shard for shard in shards for priority in shard.priorities}

    @property
    def patience(self) -> float:
        """How many intervals to wait before a poll: more while tokens arrive, one when polls are all there is."""
        return PATIENCE if all(popper.is_well for popper in self._poppers) else 1.0

    @property
    def receives_topics(self) -> bool:
        """Whether work in inboxes is announced: it has no tokens."""
        return self._subscription.receives

    def listen(self, worker: str) -> None:
        self._subscription.listen(self.topics(worker))

    def topics(self, worker: str | None = None) -> list[str]:
        """The topics by which work in inboxes is announced."""
        shared = [worker_topic(SHARED_INBOX + queue) for queue in self.queues]
        return shared if worker is None else [*shared, worker_topic(worker)]

    def deliver(self) -> None:
        """Notify the worker, which then claims."""
        if not self._closed:
            self._on_delivery()

    def deliver_from_anywhere(self) -> None:
        """The same, from any thread."""
        # Nothing waits in a loop that is closed.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.deliver)

    def offer(self, classes: frozenset[Priority]) -> None:
        self._room = classes
        self._waits = True
        if self._answering:
            # The claim for these tokens was not answered.
            self._held, self._answering = self._answering + self._held, []
        self._give_back(lambda token: token.source[1] not in classes)
        if self._held:
            # They arrived during a claim that did not take their jobs.
            self.deliver()
            return
        for popper in self._poppers:
            popper.block_on([p for p in popper.shard.priorities if p in classes])

    def claiming(self) -> None:
        self._waits = False
        self._answering += self._held
        self._held = []
        self._sent_at = time.monotonic()

    def claimed(self, claim: Claim, jobs: Sequence[Claimed]) -> None:
        taken = Counter((job.queue, job.priority) for job in jobs if job.sticky is None and job.kind is JobKind.JOB)
        self._hold_unanswered(claim, jobs, taken)
        answered = Counter(token.source for token in self._answering)
        self._answering = []
        for source, count in taken.items():
            surplus = count - answered[source]
            if surplus > 0 and self._held:
                surplus -= self._drop_held(source, surplus)
            if surplus > 0:
                self._claimed[source] += surplus
        stale = [source for source, count in answered.items() if taken[source] < count]
        if stale or (self._claimed and len(jobs) < claim.total):
            self._flush(stale)
        elif self._claimed and self._flusher is None:
            self._flusher = self._loop.call_later(FLUSH_SECONDS, self._flush)

    async def wait(self, timeout: float) -> None:
        await self._subscription.wait(timeout)

    def popped(self, token: Token) -> bool:
        """A token arrived. Returns whether it was kept: then nothing more is popped until the worker waits again."""
        if self._waits and token.source[1] not in self._room:
            self._give_back_one(token)
            return False
        self._held.append(token)
        if self._waits:
            self._waits = False
            self.deliver()
        return True

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._on_close(self)
        for popper in self._poppers:
            popper.close()
        if self._flusher is not None:
            self._flusher.cancel()
        self._subscription.close()
        self._held += self._answering
        self._give_back(lambda token: True)

    def interrupt(self, shard: Shard, key: str) -> None:
        """End the blocking call of a popper."""
        self._dispatcher.run(shard, "interrupt", [key], [])

    def _hold_unanswered(self, claim: Claim, jobs: Sequence[Claimed], taken: Counter[Source]) -> None:
        """Keep tokens of lists that the claim did not search to the end, because other jobs filled its slots."""
        left = taken.copy()
        answered = []
        for token in self._answering:
            if left[token.source] > 0:
                left[token.source] -= 1
                answered.append(token)
            elif _found_all(claim, jobs, token.source[1]):
                answered.append(token)
            else:
                self._held.append(token)
        self._answering = answered

    def _drop_held(self, source: Source, most: int) -> int:
        """Forget tokens that arrived during the claim which took their jobs."""
        kept = []
        dropped = 0
        for token in self._held:
            if token.source == source and dropped < most:
                dropped += 1
            else:
                kept.append(token)
        self._held = kept
        return dropped

    def _flush(self, stale: Iterable[Source] = ()) -> None:
        """Remove tokens whose jobs were claimed, and those of `stale` that are older than the last claim."""
        if self._flusher is not None:
            self._flusher.cancel()
            self._flusher = None
        since = int((time.monotonic() - self._sent_at) * 1_000_000)
        for source in {*self._claimed, *stale}:
            shard = self._shard_of[source[1]]
            arguments = (self._claimed[source], since if source in stale else -1)
            self._dispatcher.run(shard, "discard", [shard.keys.list(*source)], arguments)
        self._claimed.clear()

    def _give_back(self, unwanted: Callable[[Token], bool]) -> None:
        given, self._held = [t for t in self._held if unwanted(t)], [t for t in self._held if not unwanted(t)]
        for token in given:
            self._give_back_one(token)

    def _give_back_one(self, token: Token) -> None:
        keys = token.shard.keys
        self._dispatcher.run(token.shard, "give_back", [keys.list(*token.source), keys.lists], [token.value])


def _found_all(claim: Claim, jobs: Sequence[Claimed], priority: Priority) -> bool:
    """Whether a claim ended for lack of jobs of a class, and not because its slots or its bytes were used up."""
    # Every job, of whatever class, takes at most one of these slots.
    room = max((ask.most for ask in claim.asks if ask.priority is priority and ask.below is None), default=0)
    return len(jobs) < room and not claim.may_be_cut(jobs)


class Popper:
    """Blocks on lists of one server, on a connection of its own."""

    def __init__(self, shard: Shard, work: TokenWork) -> None:
        self.shard = shard
        self.is_well = False
        """Whether tokens and topics arrive here, and a leader sweeps."""
        self._work = work
        self._connect = connector(shard.address)
        self._interruption = shard.keys.interruption(secrets.token_hex(8))
        self._generation: bytes | None = None
        """What the last sweep stored."""
        self._sweeps = False
        """Whether a leader sweeps."""
        self._answers = False
        """Whether the last blocking call was answered. A server may refuse it and answer others."""
        self._wanted: frozenset[Priority] = frozenset()
        self._blocked_on: frozenset[Priority] | None = None
        """The classes of the call under way; None without one."""
        self._interrupted = False
        self._may_block = asyncio.Event()
        """Set while the worker waits for tokens of `_wanted`."""
        self._task = asyncio.ensure_future(self._run())

    def block_on(self, classes: Iterable[Priority]) -> None:
        """Wait for tokens of these classes from now on."""
        self._wanted = frozenset(classes)
        if not self._wanted:
            self._may_block.clear()
            return
        # Also during a call: it may end without a token, and the next one must follow.
        self._may_block.set()
        if self._blocked_on is not None and not self._wanted <= self._blocked_on and not self._interrupted:
            # Tokens of classes that are no longer wanted would only be given back: they need no new call.
            self._interrupted = True
            self._work.interrupt(self.shard, self._interruption)

    def close(self) -> None:
        """Stop waiting."""
        self._task.cancel()

    async def _run(self) -> None:
        failures = 0
        while True:
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    connection = await self._connect()
                try:
                    await self._pop(connection)
                finally:
                    connection.close()
            except Exception as exc:
                # Failures are counted in a row: start again if the server has answered since the last one.
                failures = 1 if self._answers else failures + 1
                self.shard.failed(translate_connecting(exc, self.shard.address))
                self._answers = self._sweeps = False
                self._judge()
            pause = min(LONGEST_PAUSE, SHORTEST_PAUSE * 2.0 ** min(failures - 1, 10))
            await asyncio.sleep(pause * random.uniform(0.5, 1))

    async def _pop(self, connection: Connection) -> None:
        """Wait for one token after the other until the connection breaks."""
        while True:
            if not self._may_block.is_set():
                await self._watch(connection)
                continue
            blocked_on = self._blocked_on = self._wanted
            sources = {
                self.shard.keys.list(q, p).encode(): (q, p) for p in sorted(blocked_on) for q in self._shuffled()
            }
            try:
                connection.send("GET", self.shard.keys.alive)
                connection.send("BLPOP", self._interruption, *sources, BLOCK_SECONDS)
                async with asyncio.timeout(BLOCK_SECONDS + CALL_SECONDS):
                    self._note(await connection.receive())
                    answer = await connection.receive()
            finally:
                self._blocked_on = None
                self._interrupted = False
            if not self._answers:
                self.shard.worked()
            self._answers = True
            self._judge()
            if answer is None or answer[0] not in sources:
                continue
            if self._work.popped(Token(self.shard, sources[answer[0]], answer[1])):
                self._may_block.clear()

    async def _watch(self, connection: Connection) -> None:
        """Look from time to time whether a leader sweeps, while nothing may be popped."""
        try:
            async with asyncio.timeout(BLOCK_SECONDS):
                await self._may_block.wait()
        except TimeoutError:
            connection.send("GET", self.shard.keys.alive)
            async with asyncio.timeout(CALL_SECONDS):
                self._note(await connection.receive())

    def _shuffled(self) -> list[str]:
        queues = list(self._work.queues)
        random.shuffle(queues)
        return queues

    def _note(self, generation: Any) -> None:
        """Process the generation that the last sweep stored; None: there was no sweep for a while."""
        self._sweeps = generation is not None
        self._judge()
        if generation is None:
            return
        if self._generation is not None and generation != self._generation:
            # Tokens were lost with the previous generation.
            self._work.deliver()
        self._generation = generation

    def _judge(self) -> None:
        # Without room for a class of this server nothing blocks, and no token is missed.
        was_well, self.is_well = (
            self.is_well,
            (self._sweeps and (self._answers or not self._wanted) and self._work.receives_topics),
        )
        if was_well and not self.is_well:
            # Claim now: the next poll was set for the long interval.
            self._work.deliver()
