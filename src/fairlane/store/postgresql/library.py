"""The function library of this store: the files of `functions/` as one text, with a version that is a digest of it.

The functions are in the schema of the tables, and the name of each ends in the version of its library: a statement
written ``fairlane.claim_one(…)`` calls ``claim_one_4be0c1d29f37`` (`statements.placed`). Two versions of the code
therefore have two libraries in one database, and each calls its own.

The migrator installs the library when it is missing, with the settings and rights below and with the grants of the
library before it. The table `library` has a row for each. Every process renews the row of the library it uses once a
day, and installing a library removes those that were not used for `UNUSED_DAYS`.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import NamedTuple

from ..codes import with_codes

PACKAGE = "fairlane.store.postgresql"
RENEWAL_SECONDS = 86_400.0
UNUSED_DAYS = 30

OWNER_RIGHTS = (
    "admit_queues", "cancel", "enqueue", "enqueue_any", "enqueue_one", "insert_arriving", "read_claimable", "read_jobs",
    "read_seconds", "read_positions", "read_workers", "use_library",
)  # fmt: skip
"""Functions that run with the rights of the schema's owner: a role that only sends jobs must neither read the payloads
of others nor be able to break the fair order. Of the two functions `read_jobs` only the one whose argument is ids."""

ENTRY_POINTS = (
    "add_token", "admit", "admit_queues", "cancel", "claim_one", "configure", "declare", "enqueue", "enqueue_any",
    "enqueue_one", "exchange", "forget_final", "insert_arriving", "lead", "leave", "promote", "prune",
    "read_bindings", "read_claimable", "read_ended", "read_failures", "read_jobs", "read_lane_line", "read_lanes",
    "read_page", "read_queues", "read_sessions", "read_positions", "recount", "register", "release", "renew", "report",
    "rescue", "resign", "revoke_token",
)  # fmt: skip
"""Functions that the store calls; all others are called by these."""

SETTINGS = {
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "enable_material": "off",
    "join_collapse_limit": "1",
    "from_collapse_limit": "1",
    "jit": "off",
}
"""Set for the entry points, and thereby for all functions they call: every statement uses indexes, and joins in the
order in which it is written. Otherwise a plan made while a table was small, or before it was analyzed, would scan the
whole table after it has grown."""

SEARCH_PATH = "search_path = pg_catalog, pg_temp"
"""A function with the owner's rights must not call a function by which a caller has replaced one of the system. All
entry points have the same path: a statement that two of them share would be planned again each time the path changes,
which costs a tenth of the work of a job (measured)."""

PREPARE = """
DO $prepare$
DECLARE
    v_schema oid := (SELECT c.relnamespace FROM pg_catalog.pg_class c WHERE c.oid = 'fairlane.library'::regclass);
    v_function regprocedure;
    v_role regrole;
    v_version text;
BEGIN
    FOR v_function IN SELECT p.oid FROM pg_catalog.pg_proc p
        WHERE p.pronamespace = v_schema AND p.proname = ANY ('{{{entry_points}}}') LOOP
        EXECUTE pg_catalog.format('ALTER FUNCTION %s {settings}', v_function);
    END LOOP;
    FOR v_function IN SELECT p.oid FROM pg_catalog.pg_proc p
        WHERE p.pronamespace = v_schema AND p.proname = ANY ('{{{owner_rights}}}')
            AND (p.proname <> 'read_jobs_{version}' OR p.pronargs = 1) LOOP
        EXECUTE pg_catalog.format('ALTER FUNCTION %s SECURITY DEFINER SET {path}', v_function);
        -- By default every role may call a new function.
        EXECUTE pg_catalog.format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', v_function);
    END LOOP;
    -- The roles that may call a function of the newest library may call the same one of this library.
    SELECT l.version INTO v_version FROM fairlane.library l ORDER BY l.installed_at DESC LIMIT 1;
    FOR v_function, v_role IN SELECT p.oid, a.grantee FROM pg_catalog.pg_proc p
        JOIN pg_catalog.pg_proc o ON o.pronamespace = v_schema AND o.prosecdef
            AND o.proname = pg_catalog.left(p.proname, -pg_catalog.length('{version}')) || v_version
        CROSS JOIN LATERAL pg_catalog.aclexplode(o.proacl) a
        WHERE p.pronamespace = v_schema AND p.prosecdef AND p.proname LIKE '%\\_{version}'
            AND a.grantee NOT IN (0, o.proowner) LOOP
        EXECUTE pg_catalog.format('GRANT EXECUTE ON FUNCTION %s TO %s', v_function, v_role);
    END LOOP;
    INSERT INTO fairlane.library (version) VALUES ('{version}');
    FOR v_version IN DELETE FROM fairlane.library l WHERE l.used_at < pg_catalog.now() - interval '{unused} days'
        RETURNING l.version LOOP
        FOR v_function IN SELECT p.oid FROM pg_catalog.pg_proc p
            WHERE p.pronamespace = v_schema AND p.proname LIKE '%\\_' || v_version LOOP
            EXECUTE pg_catalog.format('DROP FUNCTION %s', v_function);
        END LOOP;
    END LOOP;
END $prepare$
"""

INSTALLED = "use_library"
"""A library is installed if its function of this name exists: all of it is installed in one transaction."""
USE = "SELECT fairlane.use_library()"


class LibraryUse(NamedTuple):
    """How a process keeps its library installed."""

    statement: str
    """Records that the library is in use."""
    renewal_seconds: float
    install: Callable[[], Awaitable[object]]
    """Installs the library when it is missing."""


@cache
def text() -> str:
    """The text of the library, with the names of codes replaced by their numbers."""
    folder = files(PACKAGE) / "functions"
    parts = sorted((file.name, file.read_text()) for file in folder.iterdir() if file.name.endswith(".sql"))
    return with_codes("\n".join(part for _, part in parts))


@cache
def names() -> frozenset[str]:
    """The functions of the library, without the version."""
    return frozenset(re.findall(r"\bCREATE FUNCTION fairlane\.(\w+)", text()))


@cache
def version() -> str:
    """The version of the library. It depends on the text and on how the library is installed."""
    parts = (text(), PREPARE, str(ENTRY_POINTS), str(OWNER_RIGHTS), str(SETTINGS), SEARCH_PATH)
    return sha256("\n".join(parts).encode()).hexdigest()[:12]


def versioned(name: str) -> str:
    """The name of a function in the database."""
    return f"{name}_{version()}"


def scripts() -> tuple[str, ...]:
    """The statements that install the library, in one transaction."""
    settings = " ".join(f"SET {name} = {value}" for name, value in SETTINGS.items())
    prepare = PREPARE.format(
        entry_points=",".join(map(versioned, ENTRY_POINTS)),
        owner_rights=",".join(map(versioned, OWNER_RIGHTS)),
        settings=f"{settings} SET {SEARCH_PATH}",
        path=SEARCH_PATH,
        version=version(),
        unused=UNUSED_DAYS,
    )
    # Functions call others that are defined later in the text.
    return "SET LOCAL check_function_bodies = off", text(), prepare
