"""Settings of a process, read from the environment once. All problems are reported together, each with its variable."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from .errors import InvalidInput
from .model.intervals import Intervals
from .model.maintenance import Retention
from .model.names import check_count, check_name, check_seconds, shown
from .model.slots import MOST_SLOTS, Reserved, Slots, default_reserved, usual_slots
from .store import deployment

T = TypeVar("T")
PREFIX = "FAIRLANE_"
URL = "FAIRLANE_URL"
REDIS_URLS = {
    "redis": "FAIRLANE_REDIS_URL",
    "redis_high": "FAIRLANE_REDIS_HIGH_URL",
    "redis_normal": "FAIRLANE_REDIS_NORMAL_URL",
    "redis_low": "FAIRLANE_REDIS_LOW_URL",
}
"""The variable of each option of the URL that names a Redis."""
SLOTS = "FAIRLANE_MAX_CONCURRENT_TASKS"
RESERVED = "FAIRLANE_HIGH_PRIORITY_RESERVED"
RETENTION = "FAIRLANE_RETENTION_"
DEFAULT_URL = "sqlite:///fairlane.db"
DEFAULT_SLOTS = 10
MOST_WEIGHT = 1_000


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the store of this process is, and the defaults of a worker."""

    url: str = DEFAULT_URL
    """The store. Redis URLs given below become a part of it, if it is on PostgreSQL and names none itself."""
    redis_url: str | None = None
    """Redis in front of PostgreSQL, for all priorities that have none of their own."""
    redis_high_url: str | None = None
    redis_normal_url: str | None = None
    """If it is not given, normal goes with low."""
    redis_low_url: str | None = None
    slots: Slots = usual_slots(DEFAULT_SLOTS)
    high_reserved: int | None = None
    """An explicit reservation for high, independent of the number of slots; None for the default reservation."""
    queues: dict[str, int] = msgspec.field(default_factory=dict)
    """The queues a worker serves, with their weights; if empty, the queues of the application."""
    pool: str = "default"
    index: int | None = None
    grace: float = 30.0
    """Seconds that running jobs get to finish when their worker stops."""
    intervals: Intervals = Intervals()
    retention: Retention = Retention()

    def __post_init__(self) -> None:
        if not self.url:
            raise InvalidInput("url", f"must not be empty; the default is {DEFAULT_URL}")
        given = {name: url for name in REDIS_URLS if (url := getattr(self, f"{name}_url")) is not None}
        if given and deployment.takes_redis(self.url):
            msgspec.structs.force_setattr(self, "url", deployment.with_redis(self.url, given))
        for name, weight in self.queues.items():
            check_name("queues", name)
            check_count(f"queues: weight of {name}", weight, least=1, most=MOST_WEIGHT)
        check_name("pool", self.pool)
        if self.index is not None:
            check_count("index", self.index, least=0, most=1_000_000)
        check_seconds("grace", self.grace)

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Settings:
        """Read the settings from an environment; variables that are not set have their defaults."""
        return _EnvironmentReader(environ).settings()

    @property
    def database_url(self) -> str:
        """The URL of the database of a PostgreSQL store, for connections of your own: without options of Fairlane's."""
        return deployment.database_url(self.url)

    def check_store(self) -> None:
        """Raise `InvalidInput` for Redis without its PostgreSQL: jobs would go to the default store."""
        given = [variable for name, variable in REDIS_URLS.items() if getattr(self, f"{name}_url") is not None]
        if given and self.url == DEFAULT_URL:
            raise InvalidInput(given[0], f"is only for a store on PostgreSQL; set {URL}=postgresql://…")

    def slots_for(self, total: int | None) -> Slots:
        """`total` slots with the configured reservation, or the default one for that number. None: the usual slots.

        Raises `InvalidInput` with the name of the variable if the reservation leaves no slot for other work.
        """
        if total is None:
            if self.high_reserved in (None, self.slots.reserved.high):
                return self.slots
            total = self.slots.total
        if self.high_reserved is not None:
            if self.high_reserved >= total:
                raise InvalidInput(RESERVED, _leaves_none(self.high_reserved, total))
            return Slots(total=total, reserved=Reserved(high=self.high_reserved))
        chosen = self.slots.reserved != default_reserved(self.slots.total)
        return Slots(total=total, reserved=self.slots.reserved if chosen else default_reserved(total))

    def __repr__(self) -> str:
        shown = {f: getattr(self, f) for f in self.__struct_fields__}
        shown |= {f: without_password(url) for f, url in shown.items() if f.endswith("url") and url is not None}
        return f"Settings({', '.join(f'{f}={value!r}' for f, value in shown.items())})"


def without_password(url: str) -> str:
    """The URL without its secrets. In doubt it hides too much rather than part of a password."""
    return _SECRET_PARAMETER.sub(r"\1***", _PASSWORD.sub(r"\1***@", url))


_PASSWORD = re.compile(r"^([^:]+://[^/:@]*:).*@", re.DOTALL)
_SECRET_PARAMETER = re.compile(r"((?:password|passwd|secret|token|redis(?:_high|_normal|_low)?)=)[^&#]*", re.IGNORECASE)


def parse_queues(field: str, text: str) -> dict[str, int]:
    """Parse queues with weights, such as ``images=3,mail``."""
    queues: dict[str, int] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, weight = part.partition("=")
        check_name(field, name)
        if name in queues:
            raise InvalidInput(field, f"{name!r} is listed twice")
        queues[name] = check_count(field, _whole(field, weight), least=1, most=MOST_WEIGHT) if equals else 1
    return queues


def _leaves_none(high: int, total: int) -> str:
    return f"reserving {high} of {total} slots leaves none for other work"


def _by_variables(problem: str) -> str:
    """A problem of a URL's options, with the names of the variables that they came from."""
    return re.sub(r"\bredis(?:_\w+)?\b(?!://)", lambda option: REDIS_URLS.get(option[0], option[0]), problem)


class _EnvironmentReader:
    """Reads the settings from an environment and collects all problems."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        # Shells and compose files unset a variable by making it empty.
        self._environ = {name: value for name, value in environ.items() if value.strip()}
        self._problems: list[str] = []
        self._high_reserved: int | None = None

    def settings(self) -> Settings:
        found: dict[str, Any] = {
            "url": self._read(URL, lambda _, text: text.strip(), DEFAULT_URL),
            "slots": self._slots(),
            "high_reserved": self._high_reserved,
            "queues": self._read("FAIRLANE_QUEUES", parse_queues, dict[str, int]()),
            "pool": self._read("FAIRLANE_POOL", check_name, "default"),
            "index": self._read("FAIRLANE_INDEX", _index, None),
            "grace": self._read("FAIRLANE_GRACE", _seconds, 30.0),
            "intervals": self._intervals(),
            "retention": self._retention(),
        }
        for name, variable in REDIS_URLS.items():
            found[f"{name}_url"] = self._read(variable, self._redis_url, None)
        if not self._problems:
            try:
                return Settings(**found)
            except InvalidInput as exc:
                # Of the settings, only how the URLs fit together was not checked above.
                self._problems.append(f"{REDIS_URLS['redis']}: {_by_variables(exc.problem)}")
        raise InvalidInput("environment", "; ".join(self._problems))

    def _redis_url(self, name: str, text: str) -> str:
        if not deployment.takes_redis(self._environ.get(URL, "postgresql://").strip()):
            raise InvalidInput(name, f"is only for a store on PostgreSQL; set {URL}=postgresql://… without Redis in it")
        return deployment.check_redis(name, text.strip())

    def _read(self, name: str, read: Callable[[str, str], T], default: T) -> T:
        text = self._environ.get(name)
        if text is None:
            return default
        try:
            return read(name, text)
        except InvalidInput as exc:
            self._problems.append(str(exc))
            return default

    def _slots(self) -> Slots | None:
        before = len(self._problems)
        total = self._read(SLOTS, _slots, DEFAULT_SLOTS)
        self._high_reserved = self._read(RESERVED, _count, None)
        high = default_reserved(total).high if self._high_reserved is None else self._high_reserved
        if len(self._problems) > before:
            return None
        if high >= total:
            if SLOTS not in self._environ:
                # An option, or code, may give enough slots: `slots_for` compares.
                return usual_slots(total)
            self._problems.append(f"{RESERVED}: {_leaves_none(high, total)}")
            return None
        return Slots(total=total, reserved=Reserved(high=high))

    def _intervals(self) -> Intervals:
        given = {
            field: value
            for field in Intervals.__struct_fields__
            if (value := self._read(PREFIX + field.upper(), _seconds, None)) is not None
        }
        try:
            return Intervals(**given)
        except InvalidInput as exc:
            self._problems += [PREFIX + _with_variable(problem) for problem in exc.problem.split("; ")]
            return Intervals()

    def _retention(self) -> Retention:
        given: dict[str, Any] = {}
        for field in Retention.__struct_fields__:
            read: Callable[[str, str], float] = _count if field.endswith("_count") else _seconds
            value = self._read(RETENTION + field.upper(), read, None)
            if value is not None:
                given[field] = value
        return Retention(**given)


def _with_variable(problem: str) -> str:
    field, colon, rest = problem.partition(":")
    return f"{field.upper()}{colon}{rest}"


def _whole(field: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidInput(field, f"{shown(text)} is not a whole number") from None


def _seconds(field: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise InvalidInput(field, f"{shown(text)} is not a number of seconds") from None
    return check_seconds(field, number)


def _count(field: str, text: str) -> int:
    return check_count(field, _whole(field, text), least=0)


def _slots(field: str, text: str) -> int:
    return check_count(field, _whole(field, text), least=1, most=MOST_SLOTS)


def _index(field: str, text: str) -> int:
    return check_count(field, _whole(field, text), least=0, most=1_000_000)
