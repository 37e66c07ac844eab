"""The URL of a store: where the database is, and how to use it.

``postgresql://user:password@host:port/database?schema=jobs&pool=20`` is what libpq and asyncpg understand, plus three
options of our own, which the server never sees. A URL is validated here, before anything connects, and no message
repeats a part of it that may hold a password.
"""

from __future__ import annotations

import getpass
import importlib
import os
import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode

from ...errors import InvalidInput, StoreError

SCHEME = re.compile(r"postgres(?:ql)?://", re.IGNORECASE)
SCHEMA = "fairlane"
SCHEMA_BYTES = 63
"""PostgreSQL truncates longer names."""
POOL = 10
MOST_CONNECTIONS = 1_000
OWN_OPTIONS = ("schema", "pool", "listen")
SECRET_OPTIONS = ("password", "sslpassword")
CONNECT_SECONDS = 5.0
NOT_IN_THE_DRIVER = {
    "channel_binding": "it does not bind channels",
    "gssencmode": "it encrypts by TLS alone",
    "require_auth": "it takes the method that the server asks for",
    "requirepeer": "it does not look at the owner of a socket",
    "hostaddr": "give the number as the host",
    "load_balance_hosts": "hosts are tried in their order",
    "keepalives": "they are always on",
    "keepalives_idle": "the time is fixed",
    "keepalives_interval": "the time is fixed",
    "keepalives_count": "the number is fixed",
    "tcp_user_timeout": "the time is fixed",
}
"""Options of libpq that asyncpg would pass to the server as settings; the server's error would not explain that."""
SSL_MODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
SESSION_ATTRIBUTES = ("any", "primary", "standby", "prefer-standby", "read-write", "read-only")


def driver() -> Any:
    """The module asyncpg, which the extra `postgresql` installs."""
    try:
        return importlib.import_module("asyncpg")
    except ModuleNotFoundError as exc:
        raise StoreError(
            'a store on PostgreSQL needs the driver asyncpg: pip install "fairlane[postgresql]"',
        ) from exc


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A parsed URL. Its text form contains no password."""

    dsn: str = field(repr=False)
    """For asyncpg: the URL without our own options."""
    shown: str
    """The URL without secrets, for messages."""
    database: str = ""
    """The name of the database, from the URL, the environment or the user's name."""
    schema: str = SCHEMA
    pool: int = POOL
    """The most connections that one event loop opens."""
    listen: bool = True
    """Whether a connection stays with one server process, so that it can listen and prepare statements."""
    connect_seconds: float = CONNECT_SECONDS

    def __str__(self) -> str:
        """The URL without its password."""
        return self.shown


def parse(url: str) -> Address:
    """Parse a URL. Raises `InvalidInput` for ``url``, naming the invalid option."""
    begins = SCHEME.match(url)
    if begins is None:
        raise InvalidInput("url", "a PostgreSQL store is named postgresql://user:password@host:port/database")
    if not url.isprintable():
        raise InvalidInput("url", "has a character that is not printable")
    if "#" in url:
        raise InvalidInput("url", "has a '#'; in a password or a name write it as %23")
    base, _, query = url[begins.end() :].partition("?")
    authority, _, database = base.partition("/")
    if "@" in database or "@" in query:
        # The text before it may be part of a password, so no message quotes it.
        raise InvalidInput("url", "has a '/' or a '?' before an '@'; in a password write them as %2F, %3F and %40")
    user, password, hosts = _authority(authority)
    if "/" in database:
        raise InvalidInput("url", "has a '/' too many; in a password or a name write it as %2F")
    options = _options(query)
    own = {name: options.pop(name) for name in OWN_OPTIONS if name in options}
    connect_seconds = _connect_seconds(options.pop("connect_timeout", None))
    _check_options(options)
    count = _check_hosts(hosts) if hosts else _check_hosts(options.get("host", "localhost"))
    if count > 1:
        # By default the first host that answers is used, and that may be a standby, which cannot be written.
        options.setdefault("target_session_attrs", "primary")
    there = f"{'@' if user else ''}{hosts}{'/' if database else ''}{database}"
    shown = {name: "***" if name in SECRET_OPTIONS else value for name, value in (options | own).items()}
    options.setdefault("application_name", "fairlane")
    return Address(
        dsn=_with_query(f"postgresql://{user}{':' if password else ''}{password}{there}", options),
        shown=_with_query(f"postgresql://{user}{':***' if password else ''}{there}", shown),
        database=_database_name(database, options, user),
        schema=check_schema(own.get("schema", SCHEMA)),
        pool=_pool(own.get("pool")),
        listen=_listen(own.get("listen", "on")),
        connect_seconds=connect_seconds,
    )


def check_schema(name: str) -> str:
    """The name of a schema: letters and digits of any script, ``_``, ``-`` and ``.``; at most 63 bytes.

    It is inserted into quoted names, function bodies and string literals inside of those, so it must not contain
    anything that ends a quotation in any of them.
    """
    if not name or not all(letter.isalnum() or letter in "_-." for letter in name) or not name.isprintable():
        raise InvalidInput("url", f"schema: {_told(name)} may have only letters, digits and '_', '-', '.'")
    if len(name.encode()) > SCHEMA_BYTES:
        raise InvalidInput("url", f"schema: {_told(name)} is longer than {SCHEMA_BYTES} bytes")
    if name.startswith("pg_") or name == "information_schema":
        raise InvalidInput("url", f"schema: {_told(name)} belongs to PostgreSQL itself; choose another name")
    return name


def _authority(authority: str) -> tuple[str, str, str]:
    """User, password and hosts, still percent-encoded."""
    before, at, hosts = authority.rpartition("@")
    if "@" in before:
        raise InvalidInput("url", "has an '@' too many; in a password or a name write it as %40")
    user, _, password = before.partition(":")
    if at and not user:
        raise InvalidInput("url", "names no user before the '@'")
    return user, password, hosts


def _database_name(named: str, options: dict[str, str], user: str) -> str:
    """The name that the driver uses: from the URL, its options, the environment, else the name of the user."""
    environ = os.environ
    return (
        unquote(named)
        or options.get("dbname")
        or options.get("database")
        or environ.get("PGDATABASE")
        or unquote(user)
        or options.get("user")
        or environ.get("PGUSER")
        or getpass.getuser()
    )


def _options(query: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name in options:
            raise InvalidInput("url", f"{_told(name)}: is given twice")
        if not value:
            raise InvalidInput("url", f"{_told(name)}: has no value; write {_told(name)}=…, or leave it out")
        options[name] = value
    return options


def _check_options(options: dict[str, str]) -> None:
    for name, value in options.items():
        if name in NOT_IN_THE_DRIVER:
            raise InvalidInput(
                "url", f"{name}: the driver has no such option: {NOT_IN_THE_DRIVER[name]}. Leave it out."
            )
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.]*", name):
            raise InvalidInput("url", f"{_told(name)}: is not the name of an option")
        allowed = {"sslmode": SSL_MODES, "target_session_attrs": SESSION_ATTRIBUTES}.get(name)
        if allowed is not None and value not in allowed:
            raise InvalidInput("url", f"{name}: must be one of {', '.join(allowed)}")
        if name == "port" and not all(_is_port(port) for port in value.split(",")):
            raise InvalidInput("url", "port: must be a number from 1 to 65535")


def _check_hosts(hosts: str) -> int:
    """Check the ports, and count the hosts."""
    for host in hosts.split(","):
        found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+(?:%25\w+)?\]|[^\[\]:]+)(?::(.*))?", host)
        if found is None:
            # Not quoted: it may be the rest of a password that contains a '/' or a '?'.
            raise InvalidInput("url", "host: is not the name or the number of a host")
        if found[2] is not None and not _is_port(unquote(found[2])):
            raise InvalidInput("url", "port: must be a number from 1 to 65535")
    return hosts.count(",") + 1


def _is_port(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,5}", text) is not None and 1 <= int(text) <= 65_535


def _pool(text: str | None) -> int:
    if text is None:
        return POOL
    if not re.fullmatch(r"[0-9]{1,4}", text) or not 1 <= int(text) <= MOST_CONNECTIONS:
        raise InvalidInput("url", f"pool: {_told(text)} is not a number of connections from 1 to {MOST_CONNECTIONS}")
    return int(text)


def _listen(text: str) -> bool:
    if text not in ("on", "off"):
        raise InvalidInput("url", f"listen: {_told(text)} is neither on nor off")
    return text == "on"


def _connect_seconds(text: str | None) -> float:
    if text is None:
        return CONNECT_SECONDS
    if not re.fullmatch(r"[0-9]{1,4}", text) or int(text) < 1:
        raise InvalidInput("url", f"connect_timeout: {_told(text)} is not a number of seconds from 1 on")
    return float(text)


def _told(text: str) -> str:
    return repr(text) if len(text) <= 80 else f"{text[:77]!r}…"


def _with_query(base: str, options: dict[str, str]) -> str:
    return f"{base}?{urlencode(options, quote_via=quote, safe='/*,')}" if options else base
