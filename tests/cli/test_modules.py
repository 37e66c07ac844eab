"""Tasks in several modules: what an application includes and discovers, and several ``-A`` in one command."""

import pytest

from tests.cli.project import Project

APP = "from fairlane import Fairlane\napp = Fairlane({})\n"
TASK = "from artbot.app import app\n@app.task{}\nasync def {}() -> str:\n    return '{}'\n"


@pytest.fixture
def artbot(project: Project) -> Project:
    """A package with an application, tasks in three places, and modules that must not be imported."""
    for package in ("artbot", "artbot/images", "artbot/mail", "artbot/mail/tasks", "artbot/tests"):
        project.write(f"{package}/__init__.py", "")
    project.write("artbot/app.py", APP.format(""))
    project.write("artbot/tasks.py", TASK.format("", "sweep", "swept"))
    project.write("artbot/images/tasks.py", TASK.format("(queue='images', isolate=True)", "render", "rendered"))
    project.write("artbot/images/forbidden.py", "raise AssertionError('imported')")
    project.write("artbot/tests/__init__.py", "raise AssertionError('imported')")
    project.write("artbot/mail/tasks/weekly.py", TASK.format("(queue='mail')", "weekly", "sent"))
    return project


def served(project: Project, *args: str, code: int = 0) -> str:
    """The log of a worker that runs all jobs and stops."""
    worker = project.start("worker", *args, "--burst")
    _, output = worker.communicate(timeout=60)
    assert worker.returncode == code, output
    return output


def run(project: Project, name: str, *apps: str) -> object:
    """The result of a job that is sent by its full name and run by a worker."""
    id = project.read("enqueue", name, "--queue", name.split(".")[1] if name.count(".") > 2 else "default")["id"]
    served(project, *(word for app in apps for word in ("-A", app)))
    return project.read("job", id)["result"]


def test_included_modules_are_imported_by_workers_and_by_the_command_line(artbot: Project) -> None:
    artbot.write("artbot/app.py", APP.format("include=['artbot.tasks', 'artbot.images.tasks']"))
    assert run(artbot, "artbot.tasks.sweep", "artbot.app") == "swept"
    # In a child process, which imports the task's own module.
    assert run(artbot, "artbot.images.tasks.render", "artbot.app") == "rendered"
    assert artbot.read("enqueue", "-A", "artbot.app", "sweep")["created"]


def test_modules_called_tasks_are_discovered_at_any_depth_and_nothing_else_is_imported(artbot: Project) -> None:
    artbot.write("artbot/app.py", APP.format("") + "app.autodiscover('artbot')\n")
    assert run(artbot, "artbot.tasks.sweep", "artbot.app") == "swept"
    assert run(artbot, "artbot.images.tasks.render", "artbot.app") == "rendered"
    assert run(artbot, "artbot.mail.tasks.weekly.weekly", "artbot.app") == "sent"


@pytest.mark.parametrize(
    ("arguments", "more", "words"),
    [
        ("include=['artbot.taks']", "", "include: no module 'artbot.taks'"),
        ("include='artbot.tasks'", "", "include: must be a list of modules, such as ['artbot.tasks']"),
        ("include=['artbot/tasks.py']", "", "is not the dotted name of a module"),
        ("", "app.autodiscover('artbt')\n", "package 'artbt' was not found"),
        ("", "app.autodiscover('artbot.app')\n", "'artbot.app' is a module, not a package"),
        ("", "app.autodiscover('artbot.tests')\n", "has no module called 'tasks'"),
    ],
)
def test_what_cannot_be_imported_is_rejected_with_its_name(
    artbot: Project, arguments: str, more: str, words: str
) -> None:
    artbot.write("artbot/app.py", APP.format(arguments) + more)
    artbot.write("artbot/tests/__init__.py", "")
    assert words in served(artbot, "-A", "artbot.app", code=1 if "list of" in words or "dotted" in words else 2)


def test_an_included_module_that_is_broken_is_reported_with_its_traceback(artbot: Project) -> None:
    artbot.write("artbot/app.py", APP.format("include=['artbot.images.forbidden']"))
    output = served(artbot, "-A", "artbot.app", code=1)
    assert "artbot.images.forbidden could not be imported" in output
    assert "AssertionError: imported" in output


def test_a_worker_without_tasks_reports_it_and_exits(artbot: Project) -> None:
    output = served(artbot, "-A", "artbot.app", code=2)
    assert "the application has no tasks" in output
    assert "include=" in output


def test_a_further_module_may_declare_tasks_of_the_same_application(artbot: Project) -> None:
    assert run(artbot, "artbot.tasks.sweep", "artbot.app", "artbot.tasks") == "swept"
    artbot.write("bare.py", "import artbot.app\n@artbot.app.app.task\nasync def bare() -> str:\n    return 'bare'\n")
    assert run(artbot, "bare.bare", "artbot.app", "bare") == "bare"
    artbot.write("idle.py", "x = 1\n")
    assert "idle has no application" in served(artbot, "-A", "artbot.app", "-A", "idle", code=2)


SECOND = """
from fairlane import Fairlane, current_worker

app = Fairlane({})
app.queue("letters", limit=2)

@app.on_worker_start
def prepare(worker) -> None:
    worker.state.stamp = "stamped"

@app.task(queue="letters"{})
def post() -> str:
    app.blocking.queues()
    return current_worker().state.stamp
"""


def test_two_applications_at_one_store_are_served_as_one(project: Project) -> None:
    project.write("office.py", SECOND.format("", ""))
    ids = [
        project.read("enqueue", "-A", app, *task)["id"]
        for app, task in (("shop", ("render", "ann")), ("office", ("post",)))
    ]
    output = served(project, "-A", "shop", "-A", "office")
    assert "queues default,images,letters,models,slow" in output.replace(", ", ",")
    assert [project.read("job", id)["result"] for id in ids] == ["ann: a cat", "stamped"]
    [letters] = [queue for queue in project.read("queues")["queues"] if queue["name"] == "letters"]
    assert letters["limit"] == 2


def test_the_variable_names_several_too(project: Project) -> None:
    project.write("office.py", SECOND.format("", ""))
    id = project.read("enqueue", "-A", "office", "post")["id"]
    worker = project.start("worker", "--burst", FAIRLANE_APP="shop,office")
    worker.communicate(timeout=60)
    assert project.read("job", id)["result"] == "stamped"


def test_applications_that_disagree_are_rejected_and_both_are_named(project: Project) -> None:
    project.write("office.py", SECOND.format("'sqlite:///other.db'", ""))
    output = project.refused("worker", "-A", "shop", "-A", "office")
    assert "shop and office have different stores, sqlite:///fairlane.db and sqlite:///other.db" in output
    # A store is named for both, so they cannot differ.
    served(project, "-A", "shop", "-A", "office", "--url", "sqlite:///third.db")

    project.write("clash.py", SECOND.format("", ", name='shop.render'"))
    output = project.refused("worker", "-A", "shop", "-A", "clash")
    assert "shop and clash both have a task 'shop.render', in shop and clash" in output

    project.write("strict.py", SECOND.format("", "").replace('"letters", limit=2', '"models", limit=2'))
    output = project.refused("worker", "-A", "shop", "-A", "strict")
    assert "shop and strict declare queue 'models' differently" in output
