"""The rights that `ACL SETUSER` grants for each role.

Functions run with the rights of their caller, so a user needs every command that they use, on the keys of its
namespace. There is therefore no role that may only enqueue: a user that may store a job may write every key.
"""

from __future__ import annotations

from ...errors import InvalidInput
from .address import NAMESPACE

READS = (
    "EXISTS", "GET", "HEXISTS", "HGET", "HGETALL", "HKEYS", "HLEN", "HMGET", "HSCAN", "HVALS", "LRANGE", "SCARD",
    "SDIFF", "SMEMBERS", "SRANDMEMBER", "TIME", "ZCARD", "ZCOUNT", "ZMSCORE", "ZRANGE", "ZRANGEBYSCORE", "ZRANK",
    "ZREVRANGE", "ZREVRANGEBYSCORE", "ZSCORE",
)  # fmt: skip
WRITES = (
    "HDEL", "HINCRBY", "HSET", "HSETNX", "LPUSH", "LTRIM", "PUBLISH", "PUBSUB|NUMSUB", "SADD", "SET", "SREM", "ZADD",
    "ZINCRBY", "ZPOPMIN", "ZREM",
)  # fmt: skip
IN_FUNCTIONS = (*READS, *WRITES)
"""Every command that the functions use."""
AROUND = ("CLIENT|SETNAME", "FCALL_RO", "INFO", "PING", "ROLE", "SELECT", "SUBSCRIBE", "UNSUBSCRIBE")
"""What every role needs to connect, to read and to be woken. CLIENT|SETINFO is optional, and Redis 7.0 lacks it."""
KINDS = {
    "viewer": ("%R~", (*AROUND, *READS)),
    "worker": ("~", (*AROUND, "BLPOP", "FCALL", *IN_FUNCTIONS)),
    "owner": ("~", (*AROUND, "BLPOP", "FCALL", "FUNCTION|LOAD", *IN_FUNCTIONS)),
}


def rights(kind: str, namespace: str = NAMESPACE) -> list[str]:
    """The arguments after `ACL SETUSER name`: they replace the rights of the user by those of a role."""
    if kind not in KINDS:
        raise InvalidInput("kind", f"{kind!r} must be one of {', '.join(KINDS)}")
    keys, commands = KINDS[kind]
    begun = ["resetkeys", "resetchannels", "nocommands", f"{keys}{{{namespace}}}:*", f"&{{{namespace}}}:*"]
    return [*begun, *sorted(f"+{command.lower()}" for command in commands)]
