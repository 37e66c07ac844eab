"""What this store uses of redis-py and hiredis. Without them, the import raises an error with the install command."""

from ...errors import StoreError

try:
    from hiredis import ProtocolError, Reader, pack_command
    from redis.asyncio.connection import Connection, DefaultParser, SSLConnection, UnixDomainSocketConnection
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import ConnectionError as RedisConnectionError
    from redis.exceptions import RedisError, ResponseError
except ModuleNotFoundError as exc:
    raise StoreError(
        'a store on Redis or Valkey needs redis-py with hiredis: pip install "fairlane[redis]"',
    ) from exc

__all__ = [
    "Connection",
    "DefaultParser",
    "NoBackoff",
    "ProtocolError",
    "Reader",
    "RedisConnectionError",
    "RedisError",
    "ResponseError",
    "Retry",
    "SSLConnection",
    "UnixDomainSocketConnection",
    "pack_command",
]
