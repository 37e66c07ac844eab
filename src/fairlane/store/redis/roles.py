"""Who may do what on the server: the rights that `ACL SETUSER` grants for each kind of user.

Functions run with the rights of their caller, so a user needs every command that they use, for the keys of its
namespace. That is why there is no role for those who only send jobs: whoever may store one may write every key.
"""

from __future__ import annotations

from ...errors import InvalidInput
from .address import NAMESPACE

READS = (
    "EXISTS", "GET", "HEXISTS", "HGET", "HGETALL", "HKEYS", "HLEN", "HMGET", "HSCAN", "HVALS", "LRANGE", "SCARD",
    "SMEMBERS", "SRANDMEMBER", "TIME", "ZCARD", "ZCOUNT", "ZMSCORE", "ZRANGE", "ZRANGEBYSCORE", "ZRANK", "ZREVRANGE",
    "ZREVRANGEBYSCORE", "ZSCORE",
)  # fmt: skip
WRITES = (
    "HDEL", "HINCRBY", "HSET", "HSETNX", "LPUSH", "LTRIM", "PUBLISH", "PUBSUB|NUMSUB", "SADD", "SET", "SREM", "ZADD",
    "ZINCRBY", "ZPOPMIN", "ZREM",
)  # fmt: skip
IN_FUNCTIONS = (*READS, *WRITES)
"""Every command that the functions use."""
AROUND = ("CLIENT|SETNAME", "FCALL_RO", "INFO", "PING", "ROLE", "SELECT", "SUBSCRIBE", "UNSUBSCRIBE")
"""What everybody needs to connect, to look and to be woken. Redis 7.0 knows no CLIENT|SETINFO; the driver goes without.
"""
KINDS = {
    "viewer": ("%R~", (*AROUND, *READS)),
    "worker": ("~", (*AROUND, "BLPOP", "FCALL", *IN_FUNCTIONS)),
    "owner": ("~", (*AROUND, "BLPOP", "FCALL", "FUNCTION|LOAD", *IN_FUNCTIONS)),
}


def rights(kind: str, namespace: str = NAMESPACE) -> list[str]:
    """What follows `ACL SETUSER name`: instead of whatever rights the user had, those of a viewer, worker or owner."""
    if kind not in KINDS:
        raise InvalidInput("kind", f"{kind!r} is none of {', '.join(KINDS)}")
    keys, commands = KINDS[kind]
    begun = ["resetkeys", "resetchannels", "nocommands", f"{keys}{{{namespace}}}:*", f"&{{{namespace}}}:*"]
    return [*begun, *sorted(f"+{command.lower()}" for command in commands)]
