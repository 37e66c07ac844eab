"""Fairlane itself, on Redis."""

from __future__ import annotations

from benchmarks.itself import Itself


class OnRedis(Itself):
    """Each job has a field in `job`, and one in `outcome` when it has ended."""

    stored = "return redis.call('HLEN', '{fairlane}:job')"
    recorded = "return redis.call('HLEN', '{fairlane}:outcome')"


SIDE = OnRedis()
