"""Settings from the environment: valid values are read, and invalid ones are reported with their variable."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from fairlane import Fairlane, Intervals, InvalidInput, Reserved, Settings, Slots
from fairlane.config import parse_queues, without_password
from fairlane.store.deployment import RedisUrls, split_redis


def test_an_empty_environment_gives_the_defaults() -> None:
    settings = Settings.from_env({})
    assert settings == Settings()
    assert settings.url == "sqlite:///fairlane.db"
    assert settings.slots == Slots(total=10, reserved=Reserved(high=1))
    assert settings.intervals == Intervals()


def test_every_variable_is_read() -> None:
    settings = Settings.from_env(
        {
            "FAIRLANE_URL": "sqlite:///other.db",
            "FAIRLANE_MAX_CONCURRENT_TASKS": "4",
            "FAIRLANE_HIGH_PRIORITY_RESERVED": "2",
            "FAIRLANE_QUEUES": "images=3, mail",
            "FAIRLANE_POOL": "gpu",
            "FAIRLANE_INDEX": "7",
            "FAIRLANE_GRACE": "12.5",
            "FAIRLANE_HEARTBEAT": "1",
            "FAIRLANE_LEASE": "6",
            "FAIRLANE_RETENTION_COMPLETED_SECONDS": "60",
            "FAIRLANE_RETENTION_FAILED_COUNT": "5",
            "HOME": "/root",
        }
    )
    assert settings.url == "sqlite:///other.db"
    assert settings.slots == Slots(total=4, reserved=Reserved(high=2))
    assert settings.queues == {"images": 3, "mail": 1}
    assert (settings.pool, settings.index, settings.grace) == ("gpu", 7, 12.5)
    assert (settings.intervals.heartbeat, settings.intervals.lease) == (1.0, 6.0)
    assert (settings.retention.completed_seconds, settings.retention.failed_count) == (60.0, 5)


@pytest.mark.parametrize(
    ("slots", "reserved", "expected"),
    [
        *(("1", None, 0), ("3", None, 0), ("4", None, 1), ("50", None, 1)),
        *(("5", "0", 0), ("5", "4", 4), ("1", "0", 0), ("5", " ", 1)),
    ],
)
def test_one_slot_is_reserved_for_high_unless_set_otherwise(slots: str, reserved: str | None, expected: int) -> None:
    environ = {"FAIRLANE_MAX_CONCURRENT_TASKS": slots}
    if reserved is not None:
        environ["FAIRLANE_HIGH_PRIORITY_RESERVED"] = reserved
    assert Settings.from_env(environ).slots.reserved.high == expected


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("FAIRLANE_MAX_CONCURRENT_TASKS", "0"),
        ("FAIRLANE_MAX_CONCURRENT_TASKS", "-3"),
        ("FAIRLANE_MAX_CONCURRENT_TASKS", "many"),
        ("FAIRLANE_MAX_CONCURRENT_TASKS", "2.5"),
        ("FAIRLANE_HIGH_PRIORITY_RESERVED", "-1"),
        ("FAIRLANE_QUEUES", "images=0"),
        ("FAIRLANE_QUEUES", "a b"),
        ("FAIRLANE_QUEUES", "a,a"),
        ("FAIRLANE_POOL", "a/b"),
        ("FAIRLANE_INDEX", "-1"),
        ("FAIRLANE_GRACE", "nan"),
        ("FAIRLANE_GRACE", "-1"),
        ("FAIRLANE_HEARTBEAT", "soon"),
        ("FAIRLANE_HEARTBEAT", "0"),
        ("FAIRLANE_HEARTBEAT", "15"),
        ("FAIRLANE_LEADER_RENEW", "9.5"),
        ("FAIRLANE_RETENTION_COMPLETED_COUNT", "1.5"),
        ("FAIRLANE_RETENTION_FAILED_SECONDS", "-1"),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_variable(variable: str, value: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        Settings.from_env({variable: value})
    assert variable in str(refused.value)


@pytest.mark.parametrize("reserved", [10, 12])
def test_a_reservation_is_compared_with_the_slots_where_these_are_decided(reserved: int) -> None:
    settings = Settings.from_env({"FAIRLANE_HIGH_PRIORITY_RESERVED": str(reserved)})
    assert settings.slots_for(20) == Slots(total=20, reserved=Reserved(high=reserved))
    for total in (None, 10, 2):
        with pytest.raises(InvalidInput) as refused:
            settings.slots_for(total)
        assert refused.value.field == "FAIRLANE_HIGH_PRIORITY_RESERVED"
        assert f"reserving {reserved} of {total or 10} slots" in refused.value.problem
    app = Fairlane(settings=settings)
    app.task(name="length")(len)
    assert app.worker(slots=20)._settings.slots.reserved.high == reserved
    with pytest.raises(InvalidInput, match="FAIRLANE_HIGH_PRIORITY_RESERVED"):
        app.worker()


def test_a_reservation_is_compared_with_the_slots_of_the_environment() -> None:
    with pytest.raises(InvalidInput, match="FAIRLANE_HIGH_PRIORITY_RESERVED: reserving 5 of 5 slots"):
        Settings.from_env({"FAIRLANE_MAX_CONCURRENT_TASKS": "5", "FAIRLANE_HIGH_PRIORITY_RESERVED": "5"})


def test_all_problems_are_reported_at_once() -> None:
    wrong = {
        "FAIRLANE_MAX_CONCURRENT_TASKS": "0",
        "FAIRLANE_HIGH_PRIORITY_RESERVED": "-1",
        "FAIRLANE_POOL": "a b",
        "FAIRLANE_LEASE": "4",
        "FAIRLANE_LEADER_LEASE": "2",
        "FAIRLANE_GRACE": "x",
    }
    with pytest.raises(InvalidInput) as refused:
        Settings.from_env(wrong)
    for variable in ("MAX_CONCURRENT_TASKS", "HIGH_PRIORITY_RESERVED", "POOL", "HEARTBEAT", "LEADER_RENEW", "GRACE"):
        assert f"FAIRLANE_{variable}:" in str(refused.value)


def test_settings_made_by_hand_are_checked_too() -> None:
    for bad in ({"url": ""}, {"pool": "a b"}, {"index": -1}, {"grace": -1.0}, {"queues": {"a": 0}}):
        with pytest.raises(InvalidInput):
            Settings(**bad)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://ann:s3cr3t@db:5432/jobs", "postgresql://ann:***@db:5432/jobs"),
        ("redis://:s3cr3t@cache/0", "redis://:***@cache/0"),
        ("postgresql://ann:s3cr%40t@db/jobs", "postgresql://ann:***@db/jobs"),
        ("sqlite:///fairlane.db", "sqlite:///fairlane.db"),
        ("postgresql://db/jobs", "postgresql://db/jobs"),
        ("postgresql://ann:s3cr/3t@x@[db/jobs", "postgresql://ann:***@[db/jobs"),
        ("postgresql://db/jobs?user=ann&password=s3cr3t", "postgresql://db/jobs?user=ann&password=***"),
    ],
)
def test_no_password_is_ever_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown
    assert "s3cr" not in repr(Settings(url=url))


def test_queues_are_parsed_with_their_weights() -> None:
    assert parse_queues("queues", "images=3,mail,") == {"images": 3, "mail": 1}
    with pytest.raises(InvalidInput, match="--queues"):
        parse_queues("--queues", "images=x")


def test_redis_in_front_of_postgresql_becomes_part_of_the_url() -> None:
    environ = {"FAIRLANE_URL": "postgresql://db/app?pool=5", "FAIRLANE_REDIS_URL": "redis://:pass@cache/1?namespace=x"}
    settings = Settings.from_env(environ)
    url, redis = split_redis(settings.url)
    assert url == "postgresql://db/app?pool=5"
    assert redis == RedisUrls(*["redis://:pass@cache/1?namespace=x"] * 3)
    assert "pass" not in repr(settings)
    assert "pass" not in without_password(settings.url)
    # The URL of another database keeps the Redis of the environment; one that names its own does not.
    other = msgspec.structs.replace(settings, url="postgresql://db/other")
    assert split_redis(other.url) == ("postgresql://db/other", redis)
    assert msgspec.structs.replace(settings, url=other.url).url == other.url
    assert msgspec.structs.replace(settings, url="sqlite:///x.db").url == "sqlite:///x.db"


def test_the_url_of_the_database_has_no_options_of_our_own() -> None:
    """Drivers reject them, or pass them on to the server, which does."""
    url = "postgresql://ann:pass@db/app?schema=jobs&pool=5&listen=off&connect_timeout=3&sslmode=disable"
    settings = Settings(url=url, redis_url="redis://cache")
    assert settings.database_url == "postgresql://ann:pass@db/app?sslmode=disable&application_name=fairlane"
    assert Settings(url="sqlite:///x.db").database_url == "sqlite:///x.db"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"HIGH": "redis://a", "LOW": "redis://b"}, ("redis://a", "redis://b", "redis://b")),
        ({"HIGH": "redis://a", "NORMAL": "redis://c", "LOW": "redis://b"}, ("redis://a", "redis://c", "redis://b")),
        ({"": "redis://a", "HIGH": "redis://b"}, ("redis://b", "redis://a", "redis://a")),
    ],
)
def test_each_priority_may_have_its_own_redis_and_normal_goes_with_low(
    given: dict[str, str], expected: tuple[str, str, str]
) -> None:
    environ = {"FAIRLANE_REDIS_" + (f"{name}_" if name else "") + "URL": url for name, url in given.items()}
    settings = Settings.from_env({"FAIRLANE_URL": "postgresql://db/app", **environ})
    assert split_redis(settings.url)[1] == RedisUrls(*expected)


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({"URL": "sqlite:///x.db", "REDIS_URL": "redis://a"}, "FAIRLANE_REDIS_URL: is only for a store on PostgreSQL"),
        ({"URL": "postgresql://db/app", "REDIS_LOW_URL": "http://secret"}, "FAIRLANE_REDIS_LOW_URL: must be the URL"),
        (
            {"URL": "postgresql://db/app", "REDIS_LOW_URL": "redis://a:0"},
            "FAIRLANE_REDIS_LOW_URL: port: must be a number",
        ),
        ({"URL": "postgresql://db/app", "REDIS_URL": "redis://a?max=1"}, "FAIRLANE_REDIS_URL: unknown option 'max'"),
        ({"URL": "postgresql://db/app", "REDIS_HIGH_URL": "redis://a"}, "FAIRLANE_REDIS_LOW_URL: is missing"),
    ],
)
def test_a_redis_that_cannot_be_used_is_named_by_its_variable(environ: dict[str, str], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem) as refused:
        Settings.from_env({f"FAIRLANE_{name}": value for name, value in environ.items()})
    assert "secret" not in str(refused.value)


async def test_redis_without_its_postgresql_stores_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FAIRLANE_URL", raising=False)
    monkeypatch.setenv("FAIRLANE_REDIS_LOW_URL", "redis://a")
    # Not rejected yet: code or the command line may still name the database.
    app = Fairlane()
    with pytest.raises(
        InvalidInput, match="FAIRLANE_REDIS_LOW_URL: is only for a store on PostgreSQL; set FAIRLANE_URL"
    ):
        await app.client.queues()
    await app.close()
    assert not await asyncio.to_thread(Path("fairlane.db").exists)


def test_a_redis_that_cannot_be_used_is_named_by_its_option() -> None:
    with pytest.raises(InvalidInput, match=r"^url: redis_low: port: must be a number"):
        split_redis("postgresql://db/app?redis_high=redis%3A%2F%2Fa&redis_low=redis%3A%2F%2Fa%3A0")
