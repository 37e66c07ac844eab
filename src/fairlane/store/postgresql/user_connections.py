"""Connections of users: recognises their drivers, and runs one statement on them.

A driver is recognised by the names of its classes, so that no driver is imported unless the user has imported it. The
statement takes and returns one text, so it does not depend on how a driver converts types.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ...errors import Busy, FairlaneError, InvalidInput, StoreError
from .driver_errors import OWN_ERRORS

ASYNC_CALL, BLOCKING_CALL = "await app.enqueue_on(…)", "app.blocking.enqueue_on(…)"
SUPPORTED = (
    f"{ASYNC_CALL} takes a Connection of asyncpg, an AsyncConnection of psycopg, an AsyncConnection or AsyncSession of "
    f"SQLAlchemy; {BLOCKING_CALL} takes a Connection of psycopg, a Connection or Session of SQLAlchemy, or a "
    "connection of Django"
)
NO_TRANSACTION = "has no open transaction; begin one, or use enqueue"
MISSING = ("3F000", "42883", "42P01", "42704", "42703")
"""Errors for a schema, function, table, type or column that does not exist."""
_after_commit: WeakKeyDictionary[Any, list[Callable[[], None]]] = WeakKeyDictionary()
"""The functions to call after the open transaction of each session of SQLAlchemy."""


class Statement(NamedTuple):
    """A call of a function of one text, in the parameter style of each driver."""

    function: str
    """Its name with the quoted schema."""

    @property
    def numbered(self) -> str:
        """For asyncpg."""
        return f"SELECT {self.function}($1::text)"

    @property
    def formatted(self) -> str:
        """For psycopg and Django."""
        return f"SELECT {self.function.replace('%', '%%')}(%s::text)"

    @property
    def named(self) -> str:
        """For SQLAlchemy."""
        return f"SELECT {self.function.replace(':', chr(92) + ':')}(CAST(:request AS text))"


Run = Callable[[Any, Statement, str], str]
AsyncRun = Callable[[Any, Statement, str], Awaitable[str]]


class Driver(NamedTuple):
    """A kind of connection. Either `run` or `run_async` is given."""

    in_transaction: Callable[[Any], bool]
    """Whether a statement would now run in a transaction that the user ends."""
    run: Run | None = None
    run_async: AsyncRun | None = None
    after_commit: Callable[[Any, Callable[[], None]], None] | None = None
    """Calls a function after the commit of the transaction, and possibly after a rollback too."""


def async_driver_of(connection: object) -> AsyncRun:
    """The function that runs the statement on a connection for asynchronous code. Checks that a transaction is open."""
    driver = _driver_of(connection)
    if driver.run_async is None:
        raise InvalidInput("connection", f"belongs to plain code; use {BLOCKING_CALL} there")
    _check(driver, connection)
    return driver.run_async


def blocking_driver_of(connection: object) -> Run:
    """The function that runs the statement on a connection for synchronous code. Checks that a transaction is open."""
    driver = _driver_of(connection)
    if driver.run is None:
        raise InvalidInput("connection", f"belongs to asynchronous code; use {ASYNC_CALL} there")
    _check(driver, connection)
    return driver.run


def call_after_commit(connection: object, function: Callable[[], None]) -> None:
    """Call a function after the open transaction was committed or rolled back, if the driver supports that."""
    after_commit = _driver_of(connection).after_commit
    if after_commit is not None:
        after_commit(connection, function)


def own_error(exc: BaseException, schema: str) -> FairlaneError | None:
    """Fairlane's error for one that the statement raised; None if that is raised unchanged (a lost connection)."""
    error: Any = exc
    while error is not None:
        code = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
        if isinstance(code, str):
            return _meaning(code, str(error).strip().partition("\n")[0], schema)
        # SQLAlchemy and Django wrap the driver's errors, each in its own way.
        error = getattr(error, "orig", None) or error.__cause__
    return None


def _meaning(code: str, message: str, schema: str) -> FairlaneError | None:
    own = OWN_ERRORS.get(code)
    if own is not None:
        return own(message, None)
    if code == "55P03":
        return Busy("another open transaction has stored the same id or unique value; try again when it has ended")
    if code == "42501":
        return StoreError(
            f"the role of the connection may not store jobs ({message}). The owner of the schema {schema} must grant "
            "it what docs/postgresql.md lists for a producer."
        )
    if code in MISSING:
        return InvalidInput(
            "connection",
            f"leads to a database in which the schema {schema} is not what this version needs ({message}). Is it the "
            "store's own database? If so, run `fairlane migrate` as the owner of the schema.",
        )
    return None


def _driver_of(connection: object) -> Driver:
    for kind in type(connection).__mro__:
        driver = DRIVERS.get((kind.__module__.partition(".")[0], kind.__name__))
        if driver is not None and getattr(connection, "vendor", "postgresql") == "postgresql":
            return driver
    raise _unknown(connection)


def _unknown(connection: object) -> InvalidInput:
    kind = type(connection)
    return InvalidInput("connection", f"is a {kind.__module__}.{kind.__qualname__}; {SUPPORTED} to PostgreSQL")


def _check(driver: Driver, connection: object) -> None:
    if not driver.in_transaction(connection):
        raise InvalidInput("connection", NO_TRANSACTION)


# -- asyncpg ----------------------------------------------------------------------------------------------------------


async def _asyncpg(connection: Any, statement: Statement, request: str) -> str:
    return str(await connection.fetchval(statement.numbered, request))


def _asyncpg_began(connection: Any) -> bool:
    return bool(connection.is_in_transaction())


# -- psycopg ----------------------------------------------------------------------------------------------------------


def _psycopg(connection: Any, statement: Statement, request: str) -> str:
    from psycopg import Cursor
    from psycopg.rows import tuple_row

    # With the default cursor and rows: the application may have configured others on the connection.
    with Cursor(connection, row_factory=tuple_row) as cursor:
        [(answer,)] = cursor.execute(statement.formatted.encode(), (request,)).fetchall()
        return str(answer)


async def _psycopg_async(connection: Any, statement: Statement, request: str) -> str:
    from psycopg import AsyncCursor
    from psycopg.rows import tuple_row

    async with AsyncCursor(connection, row_factory=tuple_row) as cursor:
        await cursor.execute(statement.formatted.encode(), (request,))
        [(answer,)] = await cursor.fetchall()
        return str(answer)


def _psycopg_began(connection: Any) -> bool:
    """Without autocommit the driver begins a transaction with the next statement."""
    return not connection.autocommit or connection.info.transaction_status != 0


# -- SQLAlchemy -------------------------------------------------------------------------------------------------------


def _sqlalchemy(connection: Any, statement: Statement, request: str) -> str:
    from sqlalchemy import text

    return str(connection.execute(text(statement.named), {"request": request}).scalar_one())


async def _sqlalchemy_async(connection: Any, statement: Statement, request: str) -> str:
    from sqlalchemy import text

    return str((await connection.execute(text(statement.named), {"request": request})).scalar_one())


def _sqlalchemy_session(session: Any, statement: Statement, request: str) -> str:
    connection = session.connection()
    if not _sqlalchemy_began(connection):
        raise InvalidInput("connection", NO_TRANSACTION)
    return _sqlalchemy(connection, statement, request)


async def _sqlalchemy_session_async(session: Any, statement: Statement, request: str) -> str:
    connection = await session.connection()
    if not _sqlalchemy_began_async(connection):
        raise InvalidInput("connection", NO_TRANSACTION)
    return await _sqlalchemy_async(connection, statement, request)


def _sqlalchemy_began(connection: Any) -> bool:
    """Unless the driver is in autocommit mode, a transaction begins with the next statement."""
    if connection.dialect.name != "postgresql":
        raise _unknown(connection)
    return not connection.connection.dbapi_connection.autocommit


def _sqlalchemy_began_async(connection: Any) -> bool:
    return _sqlalchemy_began(connection.sync_connection)


def _sqlalchemy_session_committed(session: Any, function: Callable[[], None]) -> None:
    from sqlalchemy import event

    # A scoped session is a proxy for the session of the thread or task, an asynchronous one for a synchronous one.
    session = getattr(session, "registry", lambda: session)()
    session = getattr(session, "sync_session", session)

    functions = _after_commit.get(session)
    if functions is None:
        functions = _after_commit[session] = []
        event.listen(session, "after_transaction_end", _sqlalchemy_ended)
    functions.append(function)


def _sqlalchemy_ended(session: Any, transaction: Any) -> None:
    """Call the functions after a commit or a rollback, so that one listener suffices and no function is kept."""
    # The transaction of a savepoint has a parent.
    if transaction.parent is None:
        functions, _after_commit[session] = _after_commit[session], []
        for function in functions:
            function()


def _later(_: Any) -> bool:
    """True: a session chooses its connection when it is used, and that is checked then."""
    return True


# -- Django -----------------------------------------------------------------------------------------------------------


def _django(connection: Any, statement: Statement, request: str) -> str:
    with connection.cursor() as cursor:
        cursor.execute(statement.formatted, [request])
        [(answer,)] = cursor.fetchall()
        return str(answer)


def _django_began(connection: Any) -> bool:
    return connection.in_atomic_block or not connection.get_autocommit()


def _django_committed(connection: Any, function: Callable[[], None]) -> None:
    # `on_commit` raises an error in a transaction that was begun by turning autocommit off.
    if connection.in_atomic_block:
        connection.on_commit(function)


_ASYNCPG = Driver(_asyncpg_began, run_async=_asyncpg)
_SESSION = Driver(_later, run=_sqlalchemy_session, after_commit=_sqlalchemy_session_committed)
_ASYNC_SESSION = Driver(_later, run_async=_sqlalchemy_session_async, after_commit=_sqlalchemy_session_committed)
_DJANGO = Driver(_django_began, run=_django, after_commit=_django_committed)
DRIVERS: dict[tuple[str, str], Driver] = {
    ("asyncpg", "Connection"): _ASYNCPG,
    ("asyncpg", "PoolConnectionProxy"): _ASYNCPG,
    ("psycopg", "Connection"): Driver(_psycopg_began, run=_psycopg),
    ("psycopg", "AsyncConnection"): Driver(_psycopg_began, run_async=_psycopg_async),
    ("sqlalchemy", "Connection"): Driver(_sqlalchemy_began, run=_sqlalchemy),
    ("sqlalchemy", "AsyncConnection"): Driver(_sqlalchemy_began_async, run_async=_sqlalchemy_async),
    ("sqlalchemy", "Session"): _SESSION,
    ("sqlalchemy", "scoped_session"): _SESSION,
    ("sqlalchemy", "AsyncSession"): _ASYNC_SESSION,
    ("sqlalchemy", "async_scoped_session"): _ASYNC_SESSION,
    ("django", "BaseDatabaseWrapper"): _DJANGO,
    ("django", "ConnectionProxy"): _DJANGO,
}
"""By package and name of a class: that of the connection or one of its bases."""
