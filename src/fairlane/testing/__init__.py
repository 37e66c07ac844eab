"""Test support for code that uses Fairlane: in one process, without servers, without waiting.

    from unittest.mock import call
    from fairlane import testing

    async def test_a_signup_sends_one_mail() -> None:
        async with testing.embedded(app) as lab:
            await sign_up("ann@x")                                   # the code under test enqueues
            assert await lab.enqueued(send_mail) == [call("ann@x")]
            assert (await lab.drain()).completed == 1                # runs the job here

    def test_without_an_event_loop() -> None:
        with testing.embedded_blocking(app) as lab:
            sign_up_blocking("ann@x")
            lab.drain()

The lab moves the application to an empty store on a temporary file, with a clock that only `lab.clock.advance` moves,
and moves it back at the end. Jobs are claimed and ended by the real store and run by the real executor, so lanes,
limits, priorities, uniqueness, retries and schedules are the real ones. The differences make tests repeatable: one job
runs at a time, queues are served in rotation instead of at random, and a retry waits for its whole back-off.
"""

from .drain import Drained
from .lab import BlockingLab, Lab, embedded, embedded_blocking

__all__ = ["BlockingLab", "Drained", "Lab", "embedded", "embedded_blocking"]
