"""A second server that follows a first one, as the standby of a pair does, and can take its place."""

from __future__ import annotations

import contextlib
import time

import psycopg

from .postgresql import PATIENCE, Server, ServerFailed

NAME = "standby"
SYNCHRONOUS = (
    f"ALTER SYSTEM SET synchronous_standby_names = '{NAME}'",
    "ALTER SYSTEM SET synchronous_commit = 'remote_apply'",
    "SELECT pg_reload_conf()",
)
FOLLOWS = "SELECT 1 FROM pg_stat_replication WHERE application_name = %s AND sync_state = 'sync'"


class Standby(Server):
    """A copy of a running server. From now on it has every commit before the client of the first server is answered."""

    def __init__(self, primary: Server) -> None:
        self._primary = primary
        super().__init__(durable=True)
        try:
            self._wait_for_each_other()
        except BaseException:
            self.close()
            raise

    def promote(self) -> None:
        """Promote it. When this returns, it can be written."""
        with contextlib.closing(psycopg.connect(self.url, autocommit=True)) as connection:
            [promoted] = connection.execute("SELECT pg_promote(wait_seconds => %s)", [int(PATIENCE)]).fetchone() or [0]
        if not promoted:
            raise ServerFailed(f"the standby was not promoted:\n{self.log[-2000:]}")

    def _fill(self) -> None:
        source = f"{self._primary.url}?application_name={NAME}"
        copy = [self._programs.program("pg_basebackup"), "-D", str(self.data), "-d", source]
        self._run([*copy, "--write-recovery-conf", "--checkpoint=fast", "--no-sync"])

    def _wait_for_each_other(self) -> None:
        """Only now, so that the copied settings do not make it wait for a standby of its own."""
        with contextlib.closing(psycopg.connect(self._primary.url, autocommit=True)) as connection:
            for statement in SYNCHRONOUS:
                connection.execute(statement)
            end = time.monotonic() + PATIENCE
            while not connection.execute(FOLLOWS, [NAME]).fetchone():
                if time.monotonic() > end:
                    raise ServerFailed(f"the standby does not follow:\n{self.log[-2000:]}")
                time.sleep(0.01)
