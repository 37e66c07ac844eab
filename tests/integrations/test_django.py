"""Django: jobs that use the ORM recover from a lost connection, and tests of Django's own kind can run jobs in a lab.

Each test is a program in a process of its own, because a process has only one configuration of Django.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from urllib.parse import urlsplit

import pytest

from fairlane import Fairlane
from fairlane.integrations.django import install
from tests.cli.project import Project
from tests.servers.postgresql import server

SETTINGS = """
DATABASES = {{"default": {database!r}}}
INSTALLED_APPS = ["django.contrib.contenttypes"]
USE_TZ = True
"""
JOBS = """
import os

from asgiref.sync import sync_to_async
from django.contrib.contenttypes.models import ContentType
from django.db import connection

from fairlane import Backoff, Fairlane
from fairlane.integrations.django import install

app = Fairlane("sqlite:///jobs.db")
if "WITHOUT" not in os.environ:
    install(app)


@app.task(name="count", retries=0)
def count() -> int:
    return ContentType.objects.count()


@app.task(name="acount", retries=0)
async def acount() -> int:
    return await ContentType.objects.acount()


@app.task(name="apart", isolate=True, retries=0)
def apart() -> int:
    return ContentType.objects.count()


def terminate() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")


@app.task(name="cut", retries=0)
def cut() -> None:
    terminate()


@app.task(name="acut", retries=0)
async def acut() -> None:
    await sync_to_async(terminate)()
"""
WORKER = """
import django

django.setup()

from site1.jobs import app
"""
RECOVER = """
import asyncio, json, sys

from site1.worker import app

from django.contrib.contenttypes.models import ContentType
from django.core.management import call_command

call_command("migrate", verbosity=0)
expected = ContentType.objects.count()


async def main() -> None:
    async with app:
        jobs = [await app.registry.find(name).enqueue() for name in sys.argv[1:]]
        # One worker with one slot, so that all plain functions run in the same thread.
        await app.worker(slots=1, burst=True).run()
        ended = [await job.job() for job in jobs]
    print(json.dumps([job.state if job.result is None else json.loads(job.result) == expected for job in ended]))


asyncio.run(main())
"""
ON_SQLITE = {"ENGINE": "django.db.backends.sqlite3", "NAME": "site.db"}


@contextmanager
def on_postgresql() -> Iterator[dict[str, Any]]:
    """Django's settings for a database of its own."""
    databases = server()
    url = databases.fresh_database()
    place = urlsplit(url)
    yield {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": place.path[1:],
        "USER": place.username,
        "HOST": place.hostname,
        "PORT": place.port,
        # Connections are kept, so that a lost one is found by the next job.
        "CONN_MAX_AGE": None,
    }
    databases.done(url)


@pytest.fixture
def site(project: Project, kind: str) -> Iterator[Project]:
    """A project of Django with its data in a database of this kind."""
    with on_postgresql() if kind == "postgresql" else nullcontext(ON_SQLITE) as database:
        project.write("site1/__init__.py", "")
        project.write("site1/settings.py", SETTINGS.format(database=database))
        project.write("site1/jobs.py", JOBS)
        project.write("site1/worker.py", WORKER)
        yield project


def run(site: Project, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=site.path,
        env=os.environ | {"DJANGO_SETTINGS_MODULE": "site1.settings", "PYTHONPATH": "."} | environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def outcomes(site: Project, *names: str, **environ: str) -> list[Any]:
    """What becomes of these jobs, one after another: True for the right count, else the state."""
    site.write("recover.py", RECOVER)
    done = run(site, "recover.py", *names, **environ)
    assert done.returncode == 0, done.stderr
    states: list[Any] = json.loads(done.stdout)
    return states


@pytest.mark.parametrize("kind", ["postgresql"])
def test_jobs_recover_from_a_lost_connection(site: Project) -> None:
    names = ("count", "cut", "count", "acount", "acut", "acount", "count")
    assert outcomes(site, *names) == [True, "failed", True, True, "failed", True, True]


@pytest.mark.parametrize("kind", ["postgresql"])
def test_without_the_hooks_they_do_not(site: Project) -> None:
    names = ("count", "cut", "count", "count", "acount", "acut", "acount", "acount")
    expected = [True, "failed", "failed", "failed", True, "failed", "failed", "failed"]
    assert outcomes(site, *names, WITHOUT="1") == expected


@pytest.mark.parametrize("kind", ["sqlite"])
def test_jobs_run_on_sqlite(site: Project) -> None:
    assert outcomes(site, "count", "acount", "count", "acount") == [True] * 4


@pytest.mark.parametrize("kind", ["sqlite"])
def test_child_processes_are_set_up_by_the_module_that_the_command_names(site: Project) -> None:
    assert outcomes(site, "count") == [True]
    id = site.read("enqueue", "--url", "sqlite:///jobs.db", "apart")["id"]
    worker = site.start("worker", "-A", "site1.worker", "--burst", DJANGO_SETTINGS_MODULE="site1.settings")
    _, output = worker.communicate(timeout=60)
    assert worker.returncode == 0, output
    job = site.read("job", "--url", "sqlite:///jobs.db", id)
    assert job["state"] == "completed", job["error"]


@pytest.mark.parametrize("kind", ["sqlite"])
def test_child_processes_of_a_worker_in_a_program_are_set_up_like_it(site: Project) -> None:
    assert outcomes(site, "apart", "count", "apart") == [True] * 3


ALONE = """
import asyncio

import django
from django.conf import settings

if not settings.configured:
    settings.configure(INSTALLED_APPS=["django.contrib.contenttypes"], USE_TZ=False)
    django.setup()

from fairlane import Fairlane
from fairlane.integrations.django import install

app = Fairlane("sqlite:///jobs.db")
install(app)


@app.task(isolate=True, retries=0)
def apart() -> bool:
    from django.contrib.contenttypes.models import ContentType

    return settings.USE_TZ


async def main() -> None:
    async with app:
        job = await apart.enqueue()
        await app.worker(slots=1, burst=True).run()
        print((await job.job()).result)


if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["sqlite"])
def test_a_script_that_configures_django_itself_does_so_in_child_processes_too(site: Project) -> None:
    site.write("alone.py", ALONE)
    # The variable names other settings, which the script does not use.
    done = run(site, "alone.py")
    assert done.stdout == "b'false'\n", done.stderr


TESTS = """
from django.contrib.contenttypes.models import ContentType
from django.db import connection
from django.test import TestCase, TransactionTestCase

from fairlane import testing
from site1.jobs import acount, app, count


class Plain(TestCase):
    def setUp(self):
        ContentType.objects.create(app_label="shop", model="order")
        self.expected = ContentType.objects.count()

    def test_jobs_see_the_rows_of_the_test_and_leave_them(self):
        with testing.embedded_blocking(app) as lab:
            assert lab.run(count.blocking.enqueue()) == self.expected
        assert connection.in_atomic_block
        assert ContentType.objects.filter(app_label="shop").exists()

    async def test_coroutines_see_them_in_async_tests(self):
        async with testing.embedded(app) as lab:
            assert await lab.run(await acount.enqueue()) == self.expected
        assert await ContentType.objects.filter(app_label="shop").aexists()


class Committed(TransactionTestCase):
    available_apps = ["django.contrib.contenttypes"]

    def test_both_kinds_run(self):
        expected = ContentType.objects.count()
        with testing.embedded_blocking(app) as lab:
            assert lab.run(count.blocking.enqueue()) == expected
"""


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_lab_works_inside_djangos_test_cases(site: Project) -> None:
    site.write("site1/test_jobs.py", TESTS)
    done = run(site, "-m", "django", "test", "site1", "--noinput")
    assert done.returncode == 0, done.stderr
    assert "Ran 3 tests" in done.stderr


BEFORE_SETUP = "from django.contrib.contenttypes.models import ContentType"
INSIDE_SETUP = "import django\ndjango.setup()"


@pytest.mark.parametrize("kind", ["sqlite"])
@pytest.mark.parametrize(
    ("setup", "place", "settings", "problem"),
    [
        (BEFORE_SETUP, "site1.jobs", "site1.settings", "Apps aren't loaded yet"),
        (BEFORE_SETUP, "site1.jobs", "", "settings are not configured"),
        (INSIDE_SETUP, "site1.worker", "", "settings are not configured"),
        (INSIDE_SETUP, "site1.worker", "site1.settings", "populate() isn't reentrant"),
    ],
)
def test_an_application_that_is_imported_too_early_gets_an_error_that_says_what_to_do(
    site: Project, setup: str, place: str, settings: str, problem: str
) -> None:
    site.write("site1/jobs.py", f"{setup}\nfrom fairlane import Fairlane\napp = Fairlane()\n")
    # An application of Django that imports its tasks, as one with signals does.
    site.write("orders/__init__.py", "")
    site.write("orders/models.py", "import site1.jobs")
    site.write("site1/settings.py", "INSTALLED_APPS = ['orders']\n")
    worker = site.start("worker", "-A", place, DJANGO_SETTINGS_MODULE=settings)
    _, output = worker.communicate(timeout=60)
    assert worker.returncode == 1, output
    [line] = output.strip().splitlines()
    assert f"{place} was imported before Django was set up (" in line
    assert problem in line
    assert "call django.setup() in a module of its own" in line
    assert "docs/howto/django.md" in line


@pytest.mark.parametrize("kind", ["sqlite"])
def test_another_error_of_the_configuration_keeps_its_traceback(site: Project) -> None:
    site.write("site1/settings.py", "INSTALLED_APPS = ['django.contrib.contenttypes']\nCACHES = {'other': {}}\n")
    site.write("site1/worker.py", WORKER + "from django.core.cache import caches\ncaches['default']\n")
    worker = site.start("worker", "-A", "site1.worker", DJANGO_SETTINGS_MODULE="site1.settings")
    _, output = worker.communicate(timeout=60)
    assert worker.returncode == 1, output
    assert "site1.worker could not be imported" in output
    assert "caches['default']" in output


def test_installing_twice_adds_the_hooks_once() -> None:
    app = Fairlane()
    install(app)
    hooks = list(app.hooks.around)
    assert len(hooks) == 2
    install(app)
    assert app.hooks.around == hooks
