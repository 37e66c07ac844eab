"""What operators see of tokens: on the command line, in `doctor` and as metrics."""

from __future__ import annotations

import asyncio
import json

from click.testing import CliRunner
from prometheus_client import CollectorRegistry

from fairlane.cli.main import fairlane
from fairlane.events import Events
from fairlane.integrations.prometheus import Metrics
from fairlane.store.clock import ManualClock
from fairlane.store.deployment import with_redis
from fairlane.store.postgresql_redis.store import PostgresqlRedisStore
from tests.conformance.kit import Kit
from tests.servers import valkey
from tests.servers.valkey import ValkeyServer


async def _send_one(url: str) -> dict[str, int]:
    store = await PostgresqlRedisStore.open(url)
    await Kit(store, ManualClock()).enqueue()
    await store._dispatcher().drain()
    await store.admit()
    await store._dispatcher().drain()
    counters = await store.counters()
    await store.close()
    return counters


def test_tokens_are_shown_by_the_command_line_and_metrics(database: str) -> None:
    url = with_redis(database, {"redis": valkey.server().fresh_namespace()})
    counters = asyncio.run(_send_one(url))
    shown = CliRunner().invoke(fairlane, ["status", "--url", url], catch_exceptions=False)
    assert "1 pushed, 0 failed, 1 scanned, 0 trimmed" in shown.output
    told = json.loads(CliRunner().invoke(fairlane, ["status", "--json", "--url", url]).output)
    assert told["counters"]["tokens_pushed"] == 1
    assert "redis=***" in told["store"]
    doctor = json.loads(CliRunner().invoke(fairlane, ["doctor", "--json", "--url", url]).output)
    [found] = [f for f in doctor["findings"] if f["topic"] == "tokens of high and normal and low"]
    assert "1 pushed" in found["what"]
    registry = CollectorRegistry()
    Metrics(Events(), registry, counters=lambda: counters)
    assert registry.get_sample_value("fairlane_tokens_total", {"what": "pushed"}) == 1
    assert registry.get_sample_value("fairlane_redis_down") == 0
    assert registry.get_sample_value("fairlane_server_incidents_total", {"what": "deadlocks"}) == 0


def test_a_redis_that_is_down_is_shown_by_its_priority(database: str, own_redis: ValkeyServer) -> None:
    url = with_redis(database, {"redis_high": own_redis.url, "redis_low": valkey.server().fresh_namespace()})
    asyncio.run(_send_one(url))
    own_redis.kill()
    shown = CliRunner().invoke(fairlane, ["status", "--url", url], catch_exceptions=False)
    assert "1 Redis down, workers poll PostgreSQL" in shown.output
    doctor = json.loads(CliRunner().invoke(fairlane, ["doctor", "--json", "--url", url]).output)
    [found] = [f for f in doctor["findings"] if f["topic"] == "tokens of high"]
    assert found["level"] == "warn"
    assert "polling PostgreSQL" in found["what"]


def test_a_redis_that_rejects_its_user_is_reported_with_its_reason(database: str) -> None:
    good = valkey.server().fresh_namespace()
    url = with_redis(database, {"redis_high": good.replace("redis://", "redis://:wrong@"), "redis_low": good})
    doctor = json.loads(CliRunner().invoke(fairlane, ["doctor", "--json", "--url", url]).output)
    [found] = [f for f in doctor["findings"] if f["topic"] == "tokens of high"]
    assert found["level"] == "warn"
    assert "cannot be used" in found["what"]
    assert "reject" in found["what"]
    assert "wrong" not in json.dumps(doctor)
