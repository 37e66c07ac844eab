"""What `fairlane doctor` and metrics report about a server: its settings, room for connections, and deadlocks."""

from __future__ import annotations

import logging

from ...errors import StoreError
from ..diagnosis import Finding, Level
from .database import READ_COMMITTED, Database
from .statements import placed

logger = logging.getLogger("fairlane.postgresql")
IDLE_CONNECTIONS = 3
"""The connections of an idle worker process: for its calls, for its lease keeper and manager, and for wake-ups."""

DEADLOCKS = """
SELECT d.deadlocks, to_char(coalesce(d.stats_reset, pg_postmaster_start_time()), 'YYYY-MM-DD HH24:MI')
FROM pg_stat_database d WHERE d.datname = current_database()
"""

ISOLATION = """
SELECT s.reset_val AS level, (
    SELECT CASE WHEN r.setrole = 0 THEN format('ALTER DATABASE %I', current_database())
        WHEN r.setdatabase = 0 THEN format('ALTER ROLE %I', current_user)
        ELSE format('ALTER ROLE %I IN DATABASE %I', current_user, current_database()) END
    FROM pg_catalog.pg_db_role_setting r
    WHERE r.setrole IN (0, (SELECT oid FROM pg_catalog.pg_roles WHERE rolname = current_user))
    AND r.setdatabase IN (0, (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database()))
    AND EXISTS (SELECT FROM unnest(r.setconfig) c WHERE c LIKE 'default_transaction_isolation=%')
    ORDER BY r.setrole = 0, r.setdatabase = 0 LIMIT 1) AS source
FROM pg_catalog.pg_settings s WHERE s.name = 'default_transaction_isolation'
"""
"""The default level, and the beginning of the command that set it; NULL if it is set in postgresql.conf."""

CONNECTIONS = """
WITH present AS (
    SELECT a.usesysid, a.datname,
        a.application_name IN (current_setting('application_name'), 'fairlane wake-ups') AS ours
    FROM pg_catalog.pg_stat_activity a WHERE a.usesysid IS NOT NULL AND a.datid IS NOT NULL
), bounds AS (
    SELECT 'the server' AS whose, current_setting('max_connections')::integer
            - current_setting('superuser_reserved_connections')::integer
            - coalesce(current_setting('reserved_connections', true)::integer, 0) AS most,
        (SELECT count(*) FROM present p WHERE NOT p.ours) AS others
    UNION ALL SELECT 'database ' || d.datname, d.datconnlimit,
        (SELECT count(*) FROM present p WHERE NOT p.ours AND p.datname = d.datname)
    FROM pg_catalog.pg_database d WHERE d.datname = current_database() AND d.datconnlimit >= 0
    UNION ALL SELECT 'role ' || r.rolname, r.rolconnlimit,
        (SELECT count(*) FROM present p WHERE NOT p.ours AND p.usesysid = r.oid)
    FROM pg_catalog.pg_roles r WHERE r.rolname = current_user AND r.rolconnlimit >= 0
)
SELECT b.whose, b.most, b.others, (SELECT count(*) FROM fairlane.session s WHERE s.kind = 'worker'
    AND s.state IN ('live', 'stopping') AND s.expires > extract(epoch FROM clock_timestamp())) AS workers
FROM bounds b ORDER BY b.most - b.others LIMIT 1
"""
"""The tightest limit on connections: its subject, its number, the connections of others; and the live workers."""


async def findings(database: Database) -> list[Finding]:
    """All findings that this role has the rights to see."""
    found = [await _isolation(database), await _deadlocks_found(database)]
    if database.address.listen:
        found.append(await _connections(database))
    return found


async def warn_of_connections(database: Database) -> None:
    """Log a warning if connection limits are too low for the registered workers. A pooler has limits of its own."""
    if not database.address.listen:
        return
    try:
        finding = await _connections(database)
    except StoreError:
        return
    if finding.level is not Level.OK:
        logger.warning("%s; %s", finding.what, finding.advice)


async def _connections(database: Database) -> Finding:
    row = await database.fetchrow(placed(CONNECTIONS, database.address.schema))
    assert row is not None
    whose, most, others, workers = row["whose"], row["most"], row["others"], row["workers"]
    needed = IDLE_CONNECTIONS * workers
    what = (
        f"{whose} allows {most} connections, others have {others} of them, and {workers} worker processes hold "
        f"{IDLE_CONNECTIONS} each while idle"
    )
    if others + needed <= most:
        return Finding(Level.OK, "connections", what)
    fitting = max(0, (most - others) // IDLE_CONNECTIONS)
    advice = f"raise the limit (max_connections, or CONNECTION LIMIT), or run at most {fitting} worker processes"
    return Finding(Level.WARN, "connections", f"{what}, {needed} in all", advice)


async def _isolation(database: Database) -> Finding:
    row = await database.fetchrow(ISOLATION)
    assert row is not None
    level, source = row["level"], row["source"]
    if level == READ_COMMITTED:
        return Finding(Level.OK, "isolation", "default_transaction_isolation is read committed")
    how = (
        "the store sets read committed on its own connections"
        if database.address.listen
        else "the store sets read committed in each call, which costs two round trips more"
    )
    change = (
        f"{source} RESET default_transaction_isolation"
        if source
        else f"set default_transaction_isolation = '{READ_COMMITTED}' in postgresql.conf"
    )
    return Finding(
        Level.WARN,
        "isolation",
        f"default_transaction_isolation is {level}: {how}; transactions of yours that store jobs run at {level}",
        f"{change}; or leave it, and repeat such transactions when they fail with SQLSTATE 40001",
    )


async def counters(database: Database) -> dict[str, int]:
    """Counters that only increase until the server's statistics are reset."""
    count, _ = await _deadlocks(database)
    return {"deadlocks": count}


async def _deadlocks_found(database: Database) -> Finding:
    count, since = await _deadlocks(database)
    if not count:
        return Finding(Level.OK, "deadlocks", f"none in this database since {since}")
    return Finding(
        Level.WARN,
        "deadlocks",
        f"the server ended {count:,} deadlock{'s' if count > 1 else ''} in this database since {since}",
        "calls of Fairlane cannot deadlock with each other: the server's log names the statements; if all of "
        "them are Fairlane's, report it. SELECT pg_stat_reset() resets the count",
    )


async def _deadlocks(database: Database) -> tuple[int, str]:
    row = await database.fetchrow(DEADLOCKS)
    return (0, "") if row is None else (int(row[0]), str(row[1]))
