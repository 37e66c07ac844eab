"""URLs of stores on PostgreSQL: how they are parsed, what is rejected, and what is never shown."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from typing import Any
from urllib.parse import quote

import pytest

from fairlane.errors import InvalidInput
from fairlane.store.postgresql.address import Address, parse
from fairlane.store.postgresql.statements import changes, placed, queries, quoted

asyncpg_arguments: Any = importlib.import_module("asyncpg.connect_utils")._parse_connect_dsn_and_args


def refused(url: str) -> str:
    with pytest.raises(InvalidInput) as caught:
        parse(url)
    assert caught.value.field == "url"
    return caught.value.problem


def understood(address: Address) -> tuple[list[Any], Any]:
    """What the driver makes of it: addresses and parameters."""
    nothing = dict.fromkeys(inspect.signature(asyncpg_arguments).parameters)
    places, parameters = asyncpg_arguments(**(nothing | {"dsn": address.dsn}))
    return list(places), parameters


def test_says_where_the_database_is_and_has_defaults() -> None:
    address = parse("postgresql://ann:secret@db.example:6543/jobs")

    assert (address.schema, address.pool, address.listen, address.connect_seconds) == ("fairlane", 10, True, 5.0)
    places, parameters = understood(address)
    assert places == [("db.example", 6543)]
    assert (parameters.user, parameters.password, parameters.database) == ("ann", "secret", "jobs")
    assert parameters.server_settings == {"application_name": "fairlane"}


def test_the_short_scheme_is_the_same() -> None:
    assert parse("postgres://ann@db/jobs") == parse("postgresql://ann@db/jobs")


def test_own_options_are_taken_out_and_the_rest_goes_to_the_driver() -> None:
    address = parse(
        "postgresql://ann@db/jobs?schema=tenant_7&sslmode=require&pool=25&listen=off&connect_timeout=2"
        "&application_name=shop&statement_timeout=5000"
    )

    assert (address.schema, address.pool, address.listen, address.connect_seconds) == ("tenant_7", 25, False, 2.0)
    _, parameters = understood(address)
    assert parameters.sslmode.name == "require"
    assert parameters.server_settings == {"application_name": "shop", "statement_timeout": "5000"}


@pytest.mark.parametrize(
    ("url", "places"),
    [
        ("postgresql:///jobs?host=/run/postgresql", ["/run/postgresql/.s.PGSQL.5432"]),
        ("postgresql://%2Frun%2Fpostgresql/jobs", ["/run/postgresql/.s.PGSQL.5432"]),
        ("postgresql://[::1]:6000/jobs", [("::1", 6000)]),
        ("postgresql://one:6000,two/jobs", [("one", 6000), ("two", 5432)]),
        ("postgresql:///jobs?host=one,two&port=6000,6001", [("one", 6000), ("two", 6001)]),
    ],
)
def test_places(url: str, places: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PGHOST", "PGPORT", "PGSSLMODE", "PGTARGETSESSIONATTRS"):
        monkeypatch.delenv(name, raising=False)

    assert understood(parse(url))[0] == places


def test_a_database_that_is_not_named_is_left_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PGDATABASE", raising=False)

    for url in ("postgresql://ann@db", "postgresql://ann@db/"):
        assert understood(parse(url))[1].database == "ann"


@pytest.mark.parametrize("user", ["ann@", "a%40n@", ""])
@pytest.mark.parametrize("path", ["", "/", "/my%2Fjobs"])
@pytest.mark.parametrize("query", ["", "?dbname=by-dbname", "?database=by-database&dbname=first", "?user=eve"])
@pytest.mark.parametrize("environment", [{}, {"PGDATABASE": "by-environment"}, {"PGUSER": "pam"}])
def test_the_name_of_the_database_is_the_drivers(
    user: str, path: str, query: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PGDATABASE", "PGUSER"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    address = parse(f"postgresql://{user}db{path}{query}")
    assert address.database == understood(address)[1].database


def test_of_several_hosts_the_primary_is_wanted() -> None:
    assert understood(parse("postgresql://one,two/jobs"))[1].target_session_attrs.value == "primary"
    chosen = parse("postgresql://one,two/jobs?target_session_attrs=any")
    assert understood(chosen)[1].target_session_attrs.value == "any"
    assert "target_session_attrs" not in parse("postgresql://one/jobs").dsn


def test_names_and_passwords_may_have_any_character_when_they_are_escaped() -> None:
    address = parse("postgresql://a%40n:p%40s%2Fs%23w%3F%3A%25@db/my%2Fjobs?schema=gr%C3%B6%C3%9Fe")

    _, parameters = understood(address)
    assert (parameters.user, parameters.password, parameters.database) == ("a@n", "p@s/s#w?:%", "my/jobs")
    assert address.schema == "größe"


def test_no_password_is_shown() -> None:
    address = parse("postgresql://ann:hush1@db/jobs?password=hush2&sslpassword=hush3&schema=x&pool=3")

    assert "hush1" in address.dsn
    assert str(address) == "postgresql://ann:***@db/jobs?password=***&sslpassword=***&schema=x&pool=3"
    assert "hush" not in repr(address)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://ann:hu/sh@db/jobs",
        "postgresql://ann:hu?sh@db/jobs",
        "postgresql://ann:12/sh@db",
        "postgresql://ann:12?sh=@db",
        "postgresql://ann:hu#sh@db/jobs",
        "postgresql://ann:hu@sh@db/jobs",
        "postgresql://ann:hu:sh@db:x/jobs",
        "postgresql://ann:hush@db:port/jobs",
        "postgresql://ann:hush@db:0/jobs",
        "postgresql://ann:hush@db:99999/jobs",
        "postgresql://:hush@db/jobs",
        "postgresql://ann:hush@[::1/jobs",
        "postgresql://ann:hush@one,,two/jobs",
        "postgresql://ann:hush@db/jobs/more",
        "postgresql://ann:hush@db/jobs\n",
        "postgresql:ann:hush@db/jobs",
        "mysql://ann:hush@db/jobs",
    ],
)
def test_a_url_that_cannot_be_right_is_refused_without_showing_the_password(url: str) -> None:
    problem = refused(url)

    assert "hu" not in problem
    assert "sh" not in problem


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("schema", ""),
        ("schema", "a b"),
        ("schema", 'a"b'),
        ("schema", "a'b"),
        ("schema", "a$$b"),
        ("schema", "a%b"),
        ("schema", "a;b"),
        ("schema", "pg_jobs"),
        ("schema", "information_schema"),
        ("schema", "x" * 64),
        ("schema", "ß" * 32),
        ("pool", "0"),
        ("pool", "-1"),
        ("pool", "ten"),
        ("pool", "1001"),
        ("pool", "1.5"),
        ("listen", "yes"),
        ("listen", "ON"),
        ("connect_timeout", "0"),
        ("connect_timeout", "soon"),
        ("sslmode", "please"),
        ("target_session_attrs", "best"),
        ("port", "x"),
        ("channel_binding", "require"),
        ("keepalives_idle", "5"),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_option(option: str, value: str) -> None:
    assert option in refused(f"postgresql://ann@db/jobs?{option}={quote(value)}")


def test_an_option_given_twice_is_refused() -> None:
    assert "pool" in refused("postgresql://ann@db/jobs?pool=3&pool=4")


@pytest.mark.parametrize("name", ["Jobs", "select", "1st", "größe", "任務", "a-b.c", "x" * 63])
def test_odd_names_of_schemas(name: str) -> None:
    assert parse(f"postgresql://ann@db/jobs?schema={quote(name)}").schema == name


def test_without_the_driver_the_error_says_how_to_get_it() -> None:
    script = (
        "import sys; sys.modules['asyncpg'] = None\n"
        "from fairlane.store.postgresql.address import driver\n"
        "from fairlane.errors import StoreError\n"
        "try: driver()\n"
        "except StoreError as exc: print(exc)"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout

    assert 'pip install "fairlane[postgresql]"' in told


# -- the schema in the texts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("SELECT * FROM fairlane.job", 'SELECT * FROM "Jobs".job'),
        ("fairlane.claim(fairlane.now())", '"Jobs".claim("Jobs".now())'),
        ("nextval('fairlane.arrival')", "nextval('\"Jobs\".arrival')"),
        ("EXECUTE 'DELETE FROM fairlane.active_job'", "EXECUTE 'DELETE FROM \"Jobs\".active_job'"),
        ("l fairlane.active_job; m fairlane.moment[]", 'l "Jobs".active_job; m "Jobs".moment[]'),
        # Longer names that only end like it, and settings, which have a name of their own for that reason.
        ("SELECT my_fairlane.job, a.fairlane.b", "SELECT my_fairlane.job, a.fairlane.b"),
        ("current_setting('fairlane_step.topics', true)", "current_setting('fairlane_step.topics', true)"),
        ("SET application_name = 'fairlane'", "SET application_name = 'fairlane'"),
    ],
)
def test_where_the_schema_is_put(written: str, meant: str) -> None:
    assert placed(written, "Jobs") == meant


def test_quotes_in_a_name_are_doubled() -> None:
    assert quoted('a"b') == '"a""b"'


def test_no_text_of_another_schema_mentions_the_usual_one() -> None:
    texts = [*queries("elsewhere").values(), *(change.script for change in changes("elsewhere"))]

    assert texts
    for text in texts:
        for line in text.splitlines():
            code = line.partition("--")[0]
            assert "fairlane." not in code, line


def test_migrations_are_numbered_upwards_and_say_what_they_need() -> None:
    numbers = [change.number for change in changes("fairlane")]

    assert numbers[0] == 1
    assert numbers == sorted(set(numbers))
    assert all(1 <= change.needs <= change.number for change in changes("fairlane"))
