"""One URL for a deployment of several servers: PostgreSQL, with one Redis in front of it or one for each priority.

``postgresql://host/database?redis=redis%3A%2F%2Fhost%2F0`` names both. The Redis URLs are options of the PostgreSQL
URL, percent-encoded: ``redis`` for all priorities, ``redis_high``, ``redis_normal`` and ``redis_low`` for one.
"""

from __future__ import annotations

import re
from urllib.parse import quote, unquote_plus

import msgspec

from ..errors import InvalidInput
from .postgresql import address
from .redis import address as redis_address

POSTGRESQL = re.compile(r"postgres(?:ql)?://", re.IGNORECASE)
REDIS = re.compile(r"(?:(?:redis|valkey)s?(?:\+sentinel|\+unix)?|unix)://", re.IGNORECASE)
OPTIONS = ("redis", "redis_high", "redis_normal", "redis_low")


class RedisUrls(msgspec.Struct, frozen=True):
    """The Redis of each priority."""

    high: str
    normal: str
    low: str


def takes_redis(url: str) -> bool:
    """Whether it is the URL of a store on PostgreSQL that names no Redis yet."""
    return POSTGRESQL.match(url) is not None and split_redis(url)[1] is None


def check_redis(field: str, url: str) -> str:
    """Return the URL of a Redis or Valkey server. Raises `InvalidInput` for another one."""
    if REDIS.match(url) is None:
        raise InvalidInput(field, "must be the URL of a Redis or Valkey server, such as redis://host:6379/0")
    if (problem := _problem_of(url)) is not None:
        raise InvalidInput(field, problem)
    return url


def with_redis(url: str, given: dict[str, str]) -> str:
    """Add Redis URLs, named as in `OPTIONS`, to the URL of a PostgreSQL store."""
    for name, redis in given.items():
        check_redis(f"{name}_url", redis)
    options = "&".join(f"{name}={quote(redis, safe='')}" for name, redis in given.items())
    combined = f"{url}{'&' if '?' in url else '?'}{options}"
    split_redis(combined)
    return combined


def split_redis(url: str) -> tuple[str, RedisUrls | None]:
    """The URL of the PostgreSQL store alone, and the Redis of each priority; None if it has none."""
    base, mark, query = url.partition("?")
    if not mark or POSTGRESQL.match(url) is None:
        return url, None
    found: dict[str, str] = {}
    rest = []
    for part in query.split("&"):
        name, _, value = part.partition("=")
        if name not in OPTIONS:
            rest.append(part)
        elif name in found:
            raise InvalidInput("url", f"{name}: is given twice")
        else:
            found[name] = unquote_plus(value)
    for name, value in found.items():
        if REDIS.match(value) is None:
            raise InvalidInput("url", f"{name}: must be the percent-encoded URL of a Redis or Valkey server")
        if (problem := _problem_of(value)) is not None:
            raise InvalidInput("url", f"{name}: {problem}")
    postgresql = f"{base}?{'&'.join(rest)}" if rest else base
    return postgresql, _of_each(found) if found else None


def database_url(url: str) -> str:
    """The URL of the database alone, as drivers of PostgreSQL understand it. That of another store stays as it is."""
    return address.parse(split_redis(url)[0]).dsn if POSTGRESQL.match(url) else url


def _problem_of(redis: str) -> str | None:
    """What is wrong with the rest of a Redis URL, for a message that names which of several it is."""
    try:
        redis_address.parse(redis)
    except InvalidInput as exc:
        return exc.problem
    return None


def _of_each(found: dict[str, str]) -> RedisUrls:
    """Without its own, a priority uses the common one; normal then goes with low."""
    common = found.get("redis")
    high, low = found.get("redis_high", common), found.get("redis_low", common)
    if high is None or low is None:
        missing = "redis_high" if high is None else "redis_low"
        raise InvalidInput("url", f"{missing}: is missing; give redis for all priorities, or redis_high and redis_low")
    return RedisUrls(high=high, normal=found.get("redis_normal", low), low=low)
