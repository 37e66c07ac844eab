"""The URL of a store: where the server is, and how to use it.

``redis://user:password@host:port/database?namespace=jobs&pool=20`` names a server. ``rediss`` uses TLS,
``unix:///run/redis.sock`` is a socket, and ``redis+sentinel://one:26379,two:26379/service`` is the master of a service
that these sentinels watch. ``valkey`` means the same as ``redis``. A URL is validated here, before anything connects,
and no message repeats a part of it that may hold a password.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode

import msgspec

from ...errors import InvalidInput
from ...model.names import NAME_PATTERN, shown

SCHEME = re.compile(r"(?:(?:redis|valkey)(s?)(\+sentinel|\+unix)?|(unix))://", re.IGNORECASE)
FORM = "the URL of a store on Redis or Valkey is redis://user:password@host:port/database"
PORT = 6379
SENTINEL_PORT = 26379
NAMESPACE = "fairlane"
POOL = 10
MOST_CONNECTIONS = 1_000
CONNECT_SECONDS = 5.0
OPTIONS = ("namespace", "pool", "connect_timeout", "db")
TLS_OPTIONS = ("ca", "cert", "key", "verify")
SENTINEL_OPTIONS = ("sentinel_user", "sentinel_password")
SECRET_OPTIONS = ("password", "sentinel_password")
OTHER_NAMES = {
    "ssl_ca_certs": "did you mean 'ca'?",
    "ssl_certfile": "did you mean 'cert'?",
    "ssl_keyfile": "did you mean 'key'?",
    "ssl_cert_reqs": "certificates are checked unless you write verify=none",
    "max_connections": "did you mean 'pool'?",
    "socket_connect_timeout": "did you mean 'connect_timeout'?",
    "socket_timeout": "every call has a built-in deadline",
    "username": "write it before the '@'",
    "password": "write it before the '@'",
    "protocol": "leave it out",
    "decode_responses": "leave it out",
}
"""Options of other clients, and what to write instead."""

Endpoint = tuple[str, int] | str
"""A host and its port, or the path of a socket."""


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed URL. Its text form contains no password."""

    shown: str
    """The URL without secrets, for messages."""
    endpoints: tuple[Endpoint, ...]
    """The server, or the sentinels if there is a `service`."""
    service: str | None = None
    """The name of the service that the sentinels watch."""
    user: str | None = None
    password: str | None = None
    sentinel_user: str | None = None
    sentinel_password: str | None = None
    db: int = 0
    tls: bool = False
    ca: str | None = None
    """A file with the certificates to trust instead of the system's."""
    cert: str | None = None
    key: str | None = None
    verify: bool = True
    namespace: str = NAMESPACE
    pool: int = POOL
    """The most connections that one event loop opens."""
    connect_seconds: float = CONNECT_SECONDS

    @property
    def prefix(self) -> str:
        """The prefix of every key. Its braces keep all keys of a namespace on one node of a cluster."""
        return f"{{{self.namespace}}}:"

    def __str__(self) -> str:
        """The URL without its passwords."""
        return self.shown

    def __repr__(self) -> str:
        """Contains no password, so that none gets into a log or a traceback."""
        return f"Address({self.shown!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """The same for rich."""
        return [("shown", self.shown)]


def parse(url: str) -> Address:
    """Parse a URL. Raises `InvalidInput` for ``url``, naming the invalid option."""
    begins = SCHEME.match(url)
    if begins is None:
        raise InvalidInput("url", FORM)
    if not url.isprintable():
        raise InvalidInput("url", "has a character that is not printable")
    if "#" in url:
        raise InvalidInput("url", "has a '#'; in a password or a name write it as %23")
    tls, kind, unix = (part and part.lower() for part in begins.groups())
    kind = "+unix" if unix else kind
    if tls and kind == "+unix":
        raise InvalidInput("url", "a socket is on the same machine and has no TLS; write unix:///path/to.sock")
    base, _, query = url[begins.end() :].partition("?")
    authority, slash, path = base.partition("/")
    if "@" in path or "@" in query:
        # The text before it may be part of a password, so no message quotes it.
        raise InvalidInput("url", "has a '/' or a '?' before an '@'; in a password write them as %2F, %3F and %40")
    user, password, hosts = _authority(authority)
    more = (*(TLS_OPTIONS if tls else ()), *(SENTINEL_OPTIONS if kind == "+sentinel" else ()))
    options = _options(query, (*OPTIONS, *more))
    endpoints, service, db = _target(kind, hosts, slash + path)
    secret = "" if password is None else ":***"
    there = f"{user or ''}{secret}{'@' if user or password is not None else ''}{hosts}{slash}{path}"
    masked = {name: "***" if name in SECRET_OPTIONS else value for name, value in options.items()}
    shown_options = f"?{urlencode(masked, quote_via=quote, safe='/*,')}" if masked else ""
    cert, key = options.get("cert"), options.get("key")
    if key is not None and cert is None:
        raise InvalidInput("url", "key: needs cert=…")
    return Address(
        shown=f"{begins[0].lower()}{there}{shown_options}",
        endpoints=endpoints,
        service=service,
        user=_decoded("user", user),
        password=_decoded("password", password),
        sentinel_user=options.get("sentinel_user"),
        sentinel_password=options.get("sentinel_password"),
        db=_db(db, options.get("db")),
        tls=bool(tls),
        ca=options.get("ca"),
        cert=cert,
        key=key,
        verify=_verify(options.get("verify")),
        namespace=_namespace(options.get("namespace", NAMESPACE)),
        pool=_number("pool", options.get("pool"), POOL, MOST_CONNECTIONS, "connections"),
        connect_seconds=float(
            _number("connect_timeout", options.get("connect_timeout"), int(CONNECT_SECONDS), 9_999, "seconds")
        ),
    )


def _authority(authority: str) -> tuple[str | None, str | None, str]:
    """User, password and hosts, still percent-encoded."""
    before, at, hosts = authority.rpartition("@")
    if "@" in before:
        raise InvalidInput("url", "has more than one '@'; in a password or a name write it as %40")
    user, colon, password = before.partition(":")
    if at and not user and not password:
        raise InvalidInput("url", "has neither a user nor a password before the '@'")
    return user or None, password if colon else None, hosts


def _decoded(name: str, text: str | None) -> str | None:
    if text is None:
        return None
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise InvalidInput("url", f"{name}: is not valid percent-encoded UTF-8") from None


def _options(query: str, known: tuple[str, ...]) -> dict[str, str]:
    options: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name in options:
            raise InvalidInput("url", f"{shown(name)}: is given twice")
        if name in OTHER_NAMES:
            raise InvalidInput("url", f"unknown option {name!r}; {OTHER_NAMES[name]}")
        if name in TLS_OPTIONS and name not in known:
            raise InvalidInput("url", f"{name}: needs TLS; write rediss://…")
        if name in SENTINEL_OPTIONS and name not in known:
            raise InvalidInput("url", f"{name}: needs sentinels; write redis+sentinel://…")
        if name not in known:
            raise InvalidInput("url", f"unknown option {shown(name)}; the options are {', '.join(known)}")
        if not value:
            raise InvalidInput("url", f"{name}: has no value; write {name}=…, or leave it out")
        options[name] = value
    return options


def _target(kind: str | None, hosts: str, path: str) -> tuple[tuple[Endpoint, ...], str | None, str]:
    """The endpoints, the service that the sentinels watch, and the database as text."""
    if kind == "+unix":
        if hosts or len(path) < 2:
            raise InvalidInput("url", "a socket needs its absolute path: unix:///path/to.sock")
        return (unquote(path),), None, ""
    parts = path.removeprefix("/").split("/")
    if kind == "+sentinel":
        service, db, *more = [*parts, ""]
        if not service or any(more):
            raise InvalidInput("url", "sentinels are written redis+sentinel://one:26379,two:26379/service/database")
        return tuple(_host(host, SENTINEL_PORT) for host in hosts.split(",")), _service(unquote(service)), db
    if len(parts) > 1:
        raise InvalidInput("url", "has more than one '/'; a socket is written unix:///path/to.sock")
    if "," in hosts:
        raise InvalidInput("url", "host: there are several; sentinels are written redis+sentinel://one,two/service")
    return (_host(hosts, PORT) if hosts else ("localhost", PORT),), None, parts[0]


def _host(text: str, port: int) -> Endpoint:
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+(?:%25\w+)?\]|[^\[\]:]+)?(?::(.*))?", text)
    if found is None or not text:
        # Not quoted: it may be the rest of a password that contains a '/' or a '?'.
        raise InvalidInput("url", "host: is not a host name or an IP address")
    if found[2] is not None and not (re.fullmatch(r"[0-9]{1,5}", found[2]) and 1 <= int(found[2]) <= 65_535):
        raise InvalidInput("url", "port: must be a number from 1 to 65535")
    return unquote((found[1] or "localhost").strip("[]")), int(found[2] or port)


def _service(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", text):
        raise InvalidInput("url", f"service: {shown(text)} may have only letters, digits and '_', '-', '.'")
    return text


def _db(in_path: str, as_option: str | None) -> int:
    if in_path and as_option is not None:
        raise InvalidInput("url", "db: is given twice, in the path and as an option")
    text = in_path or as_option or "0"
    if not re.fullmatch(r"[0-9]{1,6}", text):
        # Not quoted either.
        raise InvalidInput("url", "db: must be a number; to separate applications in one database, write namespace=…")
    return int(text)


def _verify(text: str | None) -> bool:
    if text not in (None, "full", "none"):
        raise InvalidInput("url", "verify: must be full or none")
    return text != "none"


def _namespace(name: str) -> str:
    if NAME_PATTERN.fullmatch(name) is None:
        raise InvalidInput(
            "url", f"namespace: {shown(name)} must be 1 to 128 characters out of letters, digits and '_', '.', ':', '-'"
        )
    return name


def _number(name: str, text: str | None, default: int, most: int, what: str) -> int:
    if text is None:
        return default
    if not re.fullmatch(r"[0-9]{1,4}", text) or not 1 <= int(text) <= most:
        raise InvalidInput("url", f"{name}: {shown(text)} is not a number of {what} from 1 to {most}")
    return int(text)
