"""The command line as a whole: its help, how it finds an application, and how it reports errors."""

import re
import subprocess
import sys

import click
import pytest

from fairlane.cli.main import COMMANDS, fairlane
from fairlane.model import foreign_words
from tests.cli.project import Project


def test_help_lists_every_command(project: Project) -> None:
    text = project.good("--help")
    assert all(f"  {name} " in text for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(project: Project, name: str) -> None:
    assert "Usage: " in project.good(name, "--help")


def test_help_imports_neither_a_store_nor_the_worker() -> None:
    program = (
        "import sys\n"
        "from fairlane.cli.main import fairlane\n"
        "fairlane(['--help'], standalone_mode=False)\n"
        "heavy = {'fairlane.worker.worker', 'fairlane.supervisor.supervisor', 'fairlane.cli.demo.application'}\n"
        "heavy |= {'sqlite3', 'fairlane.manager.manager', 'fairlane.store.sqlite.store'}\n"
        "heavy |= {'fairlane.integrations.prometheus'}\n"
        "print('loaded:', sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert "loaded: []" in done.stdout


def test_it_runs_as_a_module(project: Project) -> None:
    process = project.start("--version")
    out, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (0, "")
    assert out.startswith("fairlane ")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(project: Project, shell: str) -> None:
    assert "_FAIRLANE_COMPLETE" in project.good("completion", shell)


# -- names of other task queues --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("-A", "shop", "worker", "-l", "info"), "options follow it: fairlane worker -A shop -l info"),
        (("--url", "redis://:sesame@host", "worker"), "options follow it: fairlane worker --url URL"),
        (("-A", "shop", "beat"), "the workers fire the schedules"),
        (("-A", "shop"), "options follow it: fairlane COMMAND [OPTIONS]"),
        (("beat",), "No such command 'beat'; leave it out: the workers fire the schedules"),
        (("flower",), "`fairlane serve` has the dashboard"),
        (("inspect", "active"), "`fairlane status`"),
        (("wroker",), "No such command 'wroker'; did you mean 'worker'?"),
        (("wholly-unknown",), "No such command 'wholly-unknown'\n"),
        (("worker", "-A", "shop", "--concurrency=4"), "No such option '--concurrency'; write --slots (-c)"),
        (("worker", "--loglevel", "info"), "write --log-level (-l)"),
        (("worker", "-B"), "the workers fire the schedules"),
        (("worker", "--slotz", "3"), "--slots"),
        (("purge", "-A", "shop"), "waiting jobs are ended by `fairlane cancel`"),
    ],
)
def test_what_other_task_queues_call_it_is_answered_with_our_word(
    project: Project, args: tuple[str, ...], words: str
) -> None:
    error = project.refused(*args)
    assert words in error
    assert "sesame" not in error


def test_hints_name_commands_and_options_that_exist_and_hide_none() -> None:
    words = {*foreign_words.COMMAND, *foreign_words.COMMAND_OPTION}
    hints = {*foreign_words.COMMAND.values(), *foreign_words.COMMAND_OPTION.values()}
    named = {name for hint in hints for name in re.findall(r"`fairlane (\w+)", hint)}
    context = click.Context(fairlane)
    worker = fairlane.get_command(context, "worker")
    assert isinstance(worker, click.Command)
    options = {option for parameter in worker.params for option in parameter.opts}
    assert named <= set(COMMANDS)
    assert {name for hint in hints for name in re.findall(r"(?<!\w)--?[a-z-]+", hint)} <= options
    assert not words & ({*COMMANDS} | options)


# -- the application -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["shop", "shop:app", "shop.py", "shop.py:app", "./shop.py"])
def test_an_application_is_found_by_module_and_by_file(project: Project, name: str) -> None:
    assert project.read("enqueue", "-A", name, "render", "ann")["created"]


def test_an_application_is_found_by_the_environment(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRLANE_APP", "shop")
    assert project.read("enqueue", "render", "ann")["created"]


def test_a_file_inside_a_package_keeps_its_dotted_name(project: Project) -> None:
    project.write("store_front/__init__.py", "")
    project.write("store_front/names.py", "QUEUE = 'front'")
    project.write(
        "store_front/tasks.py",
        "from fairlane import Fairlane\nfrom .names import QUEUE\napp = Fairlane()\n"
        "@app.task(queue=QUEUE)\nasync def greet() -> None: ...\n",
    )
    id = project.read("enqueue", "-A", "store_front/tasks.py", "greet")["id"]
    job = project.read("job", id)
    assert (job["task"], job["queue"]) == ("store_front.tasks.greet", "front")


def test_a_missing_module_is_reported_with_the_directory_that_was_searched(project: Project) -> None:
    output = project.refused("worker", "-A", "nowhere:app")
    assert "nowhere" in output
    assert str(project.path) in output


def test_a_missing_module_in_a_subdirectory_is_suggested(project: Project) -> None:
    project.write("inner/lost.py", "")
    assert "inner/lost.py" in project.refused("worker", "-A", "lost")


def test_a_missing_file_is_reported(project: Project) -> None:
    assert "no file 'src/gone.py'" in project.refused("worker", "-A", "src/gone.py:app")


def test_a_module_without_an_application_is_reported_with_what_it_has(project: Project) -> None:
    project.write("bare.py", "first = 1\nsecond = 2\n")
    output = project.refused("worker", "-A", "bare")
    assert "no application" in output
    assert "first, second" in output


def test_several_applications_are_listed(project: Project) -> None:
    project.write("twins.py", "from fairlane import Fairlane\none = Fairlane()\ntwo = Fairlane()\n")
    output = project.refused("worker", "-A", "twins")
    assert "twins:one, twins:two" in output


def test_another_kind_of_object_is_reported(project: Project) -> None:
    project.write("odd.py", "from fairlane import Fairlane\napp = 3\nreal = Fairlane()\n")
    output = project.refused("worker", "-A", "odd:app")
    assert "it is of type int, not a Fairlane application" in output
    assert "use -A odd:real" in output


def test_an_error_in_the_module_is_shown_with_the_users_own_line(project: Project) -> None:
    project.write("broken.py", "import json\nvalue = json.loads('{')\n")
    result = project.run("worker", "-A", "broken")
    assert result.exit_code == 1
    assert "broken could not be imported" in result.stderr
    assert 'broken.py", line 2' in result.stderr
    assert "importlib" not in result.stderr
    assert "JSONDecodeError" in result.stderr


def test_a_missing_import_inside_the_module_is_the_modules_error(project: Project) -> None:
    project.write("needy.py", "import not_installed_anywhere\n")
    result = project.run("worker", "-A", "needy")
    assert result.exit_code == 1
    assert "needy.py" in result.stderr
    assert "not_installed_anywhere" in result.stderr


def test_a_worker_needs_an_application(project: Project) -> None:
    assert "-A module:app" in project.refused("worker")


# -- settings --------------------------------------------------------------------------------------------------------


def test_every_problem_of_a_worker_is_reported_at_once(project: Project) -> None:
    output = project.refused(
        *("worker", "-A", "shop", "-Q", "a/b", "-c", "0", "--reserved", "top=1"),
        *("--index", "first", "--grace", "-1", "--pool", "a b", "--processes", "0"),
    )
    for option in ("--queues", "--slots", "--reserved", "--index", "--grace", "--pool", "--processes"):
        assert f"{option}: " in output
    assert output.startswith("Error: --queues: ")
    only = project.refused("worker", "-A", "shop", "--processes", "0")
    assert only.startswith("Error: --processes: ")


def test_reservations_must_leave_a_slot(project: Project) -> None:
    assert "--reserved: " in project.refused("worker", "-A", "shop", "-c", "2", "--reserved", "high=1,normal=1")


def test_a_bad_variable_is_reported_by_its_name(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRLANE_MAX_CONCURRENT_TASKS", "0")
    monkeypatch.setenv("FAIRLANE_HEARTBEAT", "soon")
    output = project.refused("worker", "-A", "shop")
    assert "FAIRLANE_MAX_CONCURRENT_TASKS" in output
    assert "FAIRLANE_HEARTBEAT" in output


def test_the_service_refuses_names_that_can_never_match(project: Project) -> None:
    for option, value in (("--allowed-host", "http://x"), ("--origin", "shop.example")):
        assert f"Error: {option}: {value!r} must be" in project.refused("serve", "-A", "shop", option, value)


def test_only_workers_compare_the_reservation_with_their_slots(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIRLANE_HIGH_PRIORITY_RESERVED", "12")
    project.good("enqueue", "any.task")
    project.good("status")
    assert "FAIRLANE_HIGH_PRIORITY_RESERVED: reserving 12 of 10 slots" in project.refused("worker", "-A", "shop")


def test_a_password_is_never_shown(project: Project) -> None:
    result = project.run("status", "--url", "mystery://ann:s3cret@host/db")
    assert result.exit_code == 2
    assert "s3cret" not in result.output
    result = project.run("doctor", "--url", "mystery://ann:s3cret@host/db")
    assert result.exit_code == 1
    assert "ann:***@host" in result.output
    assert "s3cret" not in result.output


def test_the_url_of_the_command_line_wins(project: Project) -> None:
    project.good("enqueue", "-A", "shop", "--url", "sqlite:///other.db", "render", "ann")
    assert (project.path / "other.db").exists()
    assert project.read("jobs")["jobs"] == []


def test_debug_shows_the_error_itself(project: Project) -> None:
    result = project.run("job", "unknown", "--debug")
    assert type(result.exception).__name__ == "NotFound"


def test_a_store_that_cannot_be_opened_is_one_line(project: Project) -> None:
    project.write("fairlane.db", "this is not a database, and it is long enough to look like one" * 20)
    output = project.refused("status", code=1)
    assert len(output.strip().splitlines()) == 1
