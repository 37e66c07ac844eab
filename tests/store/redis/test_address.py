"""URLs of stores on Redis and Valkey: what they say, what is refused, and what is never shown."""

from __future__ import annotations

import io
import subprocess
import sys
from urllib.parse import quote

import pytest
from rich.console import Console

from fairlane.errors import InvalidInput
from fairlane.store.redis.address import Address, parse


def refused(url: str) -> str:
    with pytest.raises(InvalidInput) as caught:
        parse(url)
    assert caught.value.field == "url"
    return caught.value.problem


def test_a_url_names_the_server_and_has_defaults() -> None:
    address = parse("redis://db.example")

    assert address.endpoints == (("db.example", 6379),)
    assert (address.user, address.password, address.db, address.tls) == (None, None, 0, False)
    assert (address.namespace, address.prefix) == ("fairlane", "{fairlane}:")
    assert (address.pool, address.connect_seconds, address.service) == (10, 5.0, None)


def test_all_of_it() -> None:
    address = parse("redis://ann:secret@db.example:6380/3?namespace=shop:eu&pool=25&connect_timeout=2")

    assert address.endpoints == (("db.example", 6380),)
    assert (address.user, address.password, address.db) == ("ann", "secret", 3)
    assert (address.prefix, address.pool, address.connect_seconds) == ("{shop:eu}:", 25, 2.0)


@pytest.mark.parametrize(
    ("url", "place", "db"),
    [
        ("redis://", ("localhost", 6379), 0),
        ("redis:///2", ("localhost", 6379), 2),
        ("redis://:6380", ("localhost", 6380), 0),
        ("redis://db?db=4", ("db", 6379), 4),
        ("redis://db/", ("db", 6379), 0),
        ("REDIS://db", ("db", 6379), 0),
        ("redis://[::1]:6000/1", ("::1", 6000), 1),
        ("valkey://db/1", ("db", 6379), 1),
        ("unix:///run/valkey/valkey.sock", "/run/valkey/valkey.sock", 0),
        ("unix:///run/a%20b.sock?db=2", "/run/a b.sock", 2),
        ("redis+unix:///run/redis.sock", "/run/redis.sock", 0),
        ("valkey+unix:///run/redis.sock", "/run/redis.sock", 0),
    ],
)
def test_places(url: str, place: tuple[str, int] | str, db: int) -> None:
    address = parse(url)

    assert (address.endpoints, address.db) == ((place,), db)


def test_a_socket_has_users_too() -> None:
    address = parse("unix://ann:secret@/run/redis.sock")

    assert (address.user, address.password, address.endpoints) == ("ann", "secret", ("/run/redis.sock",))


@pytest.mark.parametrize("scheme", ["rediss", "valkeys"])
def test_tls_certificates_are_verified_by_default(scheme: str) -> None:
    plain, mine, careless = (
        parse(f"{scheme}://db{options}") for options in ("", "?ca=/a.pem&cert=/b.pem&key=/c.pem", "?verify=none")
    )

    assert all(address.tls for address in (plain, mine, careless))
    assert (plain.verify, mine.verify, careless.verify) == (True, True, False)
    assert (mine.ca, mine.cert, mine.key) == ("/a.pem", "/b.pem", "/c.pem")


@pytest.mark.parametrize("scheme", ["redis+sentinel", "rediss+sentinel", "valkey+sentinel", "valkeys+sentinel"])
def test_sentinels(scheme: str) -> None:
    address = parse(f"{scheme}://ann:secret@one:26380,two,[::1]/jobs/2?sentinel_user=bob&sentinel_password=s%26s")

    assert address.endpoints == (("one", 26380), ("two", 26379), ("::1", 26379))
    assert (address.service, address.db, address.tls) == ("jobs", 2, scheme.startswith(("rediss", "valkeys")))
    assert (address.user, address.password) == ("ann", "secret")
    assert (address.sentinel_user, address.sentinel_password) == ("bob", "s&s")


def test_users_and_passwords_may_have_any_character_when_they_are_escaped() -> None:
    address = parse("redis://a%40n:p%40s%2Fs%23w%3F%3A%25+@db")
    alone = parse("redis://:with:colons@db")

    assert (address.user, address.password) == ("a@n", "p@s/s#w?:%+")
    assert (alone.user, alone.password) == (None, "with:colons")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://ann:hush@db:6380/3?pool=3", "redis://ann:***@db:6380/3?pool=3"),
        ("redis://:hush@db", "redis://:***@db"),
        ("redis://ann@db", "redis://ann@db"),
        ("unix://:hush@/run/redis.sock", "unix://:***@/run/redis.sock"),
        (
            "rediss+sentinel://ann:hush1@one,two:1/jobs/1?sentinel_password=hush2&ca=/a.pem",
            "rediss+sentinel://ann:***@one,two:1/jobs/1?sentinel_password=***&ca=/a.pem",
        ),
    ],
)
def test_no_password_is_shown(url: str, shown: str) -> None:
    address = parse(url)
    screen = io.StringIO()
    Console(file=screen, width=200).print(address, [address])

    assert str(address) == shown
    assert "hush" not in f"{address!r} {[address]} {screen.getvalue()}"
    assert address.password is None or address.password.startswith("hush")


def test_addresses_are_values() -> None:
    address = parse("redis://ann:hush@db")

    assert address == parse("redis://ann:hush@db")
    assert isinstance(address, Address)
    with pytest.raises(AttributeError):
        address.pool = 3  # type: ignore[misc]  # the mistake


@pytest.mark.parametrize(
    "url",
    [
        "redis://ann:hu/sh@db",
        "redis://ann:hu?sh@db",
        "redis://ann:12/sh@db",
        "redis://ann:hu#sh@db",
        "redis://ann:hu@sh@db",
        "redis://ann:hush@db:port",
        "redis://ann:hush@db:0",
        "redis://ann:hush@db:99999",
        "redis://ann:%ffhush@db",
        "redis://@db",
        "redis://ann:hush@[::1",
        "redis://ann:hush@one,two",
        "redis://ann:hush@db/jobs",
        "redis://ann:hush@db/1/2",
        "redis://ann:hush@db/1?db=2",
        "redis://ann:hush@db\n",
        "redis://db?password=hush",
        "redis:ann:hush@db",
        "http://ann:hush@db",
        "rediss+unix:///run/redis.sock",
        "unix://ann:hush@",
        "unix://run/redis.sock",
        "redis+sentinel://ann:hush@one,two",
        "redis+sentinel://ann:hush@one,,two/jobs",
        "redis+sentinel://ann:hush@one/jobs/x",
        "redis+sentinel://ann:hush@one/jobs/1/2",
        "redis+sentinel://ann:hush@one/my%20jobs",
    ],
)
def test_a_url_that_cannot_be_right_is_refused_without_showing_the_password(url: str) -> None:
    problem = refused(url)

    assert "hu" not in problem
    assert "sh" not in problem


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("namespace", ""),
        ("namespace", "a b"),
        ("namespace", "{a}"),
        ("namespace", "x" * 129),
        ("pool", "0"),
        ("pool", "ten"),
        ("pool", "1001"),
        ("connect_timeout", "0"),
        ("connect_timeout", "soon"),
        ("db", "x"),
        ("db", "-1"),
        ("verify", "maybe"),
        ("key", "/only/a/key.pem"),
        ("sentinel_user", "ann"),
        ("pol", "5"),
        ("ssl_cert_reqs", "none"),
        ("max_connections", "5"),
    ],
)
def test_a_bad_option_is_refused_by_its_name(option: str, value: str) -> None:
    assert option in refused(f"rediss://ann@db?{option}={quote(value)}")


@pytest.mark.parametrize("option", ["ca=/a.pem", "cert=/a.pem", "key=/a.pem", "verify=none"])
def test_options_of_tls_need_tls(option: str) -> None:
    assert "rediss://" in refused(f"redis://db?{option}")


def test_an_option_given_twice_is_refused() -> None:
    assert "pool" in refused("redis://db?pool=3&pool=4")


@pytest.mark.parametrize("module", ["redis", "hiredis"])
def test_without_the_driver_the_error_contains_the_install_command(module: str) -> None:
    script = (
        f"import sys; sys.modules[{module!r}] = None\n"
        "from fairlane.errors import StoreError\n"
        "try: import fairlane.store.redis.connection_pool\n"
        "except StoreError as exc: print(exc)"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout

    assert 'pip install "fairlane[redis]"' in told


def test_the_driver_is_imported_only_when_it_is_needed() -> None:
    script = (
        "import sys, fairlane, fairlane.store, fairlane.store.redis.address\n"
        "assert not {'redis', 'hiredis'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
