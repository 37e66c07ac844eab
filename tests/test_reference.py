"""The reference is the code as it is: every verb, option, variable, error and table, and none that does not exist."""

import inspect
import re
from pathlib import Path
from typing import Any

import click
import prometheus_client
import pytest

import fairlane
from fairlane import errors
from fairlane.blocking import BlockingClient, BlockingHandle
from fairlane.cli.main import COMMANDS
from fairlane.cli.main import fairlane as command_line
from fairlane.config import PREFIX, RETENTION, Settings
from fairlane.events import Event
from fairlane.integrations.prometheus import Metrics
from fairlane.model.intervals import Intervals
from fairlane.model.job import Acceptance
from fairlane.model.maintenance import Retention
from fairlane.model.reading import Gate
from fairlane.runtime.running_job import RunningJob
from fairlane.store.port import Store
from fairlane.task import OneCall, TaskSettings
from fairlane.testing import BlockingLab

from .pages import DOCS, ROOT, tables_under, text_of

SOURCE = ROOT / "src" / "fairlane"
MIGRATIONS = SOURCE / "store" / "sqlite" / "migrations"
EVERYWHERE = ("--app", "--url", "--json", "--debug")
"""Options that stand in one table for all commands."""
ERRORS = {
    name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, errors.FairlaneError)
}


def first_cells(page: str, heading: str) -> list[str]:
    """The names in the first column of the tables of a section, without what is said about arguments."""
    rows = tables_under(text_of(DOCS / page), heading)
    return [name for row in rows for name in re.findall(r"`(\w[\w.-]*)", row[0])]


def public(*classes: type) -> set[str]:
    """What the classes offer under a name without an underscore."""
    return {name for cls in classes for name in vars(cls) if not name.startswith("_")}


# -- the store -------------------------------------------------------------------------------------------------------


def verbs() -> dict[str, str]:
    """The port as the page writes it: each verb with the names of its arguments, and what it answers."""
    found = {}
    for name, member in vars(Store).items():
        if isinstance(member, property):
            assert member.fget is not None
            found[f"`{name}`"] = f"`{inspect.signature(member.fget).return_annotation}`"
        elif inspect.isfunction(member) and not name.startswith("_"):
            signature = inspect.signature(member)
            plain = [p.replace(annotation=p.empty) for p in list(signature.parameters.values())[1:]]
            found[f"`{name}{inspect.Signature(plain)}`"] = f"`{signature.return_annotation}`"
    return found


def test_the_reference_of_the_store_has_each_verb_as_it_is_and_no_other() -> None:
    page = {verb: answer for verb, answer, does in tables_under(text_of(DOCS / "store.md"), "## The verbs") if does}
    assert page == verbs()


def test_the_reference_of_the_store_explains_every_verdict() -> None:
    page = [row[0] for row in tables_under(text_of(DOCS / "store.md"), "## Verdicts")]
    assert page == [f"`{acceptance.value}`" for acceptance in Acceptance]


def test_the_reference_of_the_store_explains_every_error() -> None:
    page = [row[0].strip("`") for row in tables_under(text_of(DOCS / "store.md"), "## Errors")]
    tree = ERRORS
    assert sorted(page) == sorted(tree - {"FairlaneError"})


def test_the_page_of_the_sqlite_store_explains_every_table_of_the_file() -> None:
    schema = "".join(text_of(path) for path in sorted(MIGRATIONS.glob("*.sql")))
    page = [
        name
        for row in tables_under(text_of(DOCS / "sqlite.md"), "## The file")
        for name in re.findall(r"fairlane_\w+", row[0])
    ]
    made = re.findall(r"^CREATE (?:TABLE|VIEW) (\w+)", schema, re.MULTILINE)
    assert sorted(page) == sorted({*made, "fairlane_schema"})


# -- the Python API --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        (
            "## The application",
            public(fairlane.Fairlane) - {"declare"} | {"blocking", "client", "events", "settings"},
        ),
        ("## Options", {*TaskSettings.__annotations__, *OneCall.__annotations__}),
        ("## Queues and lanes", set(inspect.signature(fairlane.Fairlane.queue).parameters) - {"self", "name"}),
        ("## Tasks", {"call", "enqueue", "blocking", "options", "name", "queue"}),
        ("## Handles", public(fairlane.Handle, fairlane.BroadcastHandle)),
        (
            "## The running job",
            {name for name in public(RunningJob) if not str(getattr(RunningJob, name).__doc__).startswith("Called ")},
        ),
        ("## Turns", {*inspect.signature(fairlane.Fairlane.turn).parameters} - {"self"}),
        ("## The client", public(fairlane.Client)),
        ("## Errors", ERRORS),
        ("## What a job waits for", {gate.value for gate in Gate}),
    ],
)
def test_the_reference_of_the_api_has_each_name_and_no_other(heading: str, names: set[str]) -> None:
    assert sorted(set(first_cells("api.md", heading))) == sorted(names)


def test_the_reference_of_the_api_mentions_everything_that_the_package_exports() -> None:
    page = text_of(DOCS / "api.md")
    assert [name for name in fairlane.__all__ if not re.search(rf"\b{name}\b", page)] == []


def test_blocking_code_has_the_verbs_that_the_page_promises_it() -> None:
    """The page says: the same verbs, except for the one that takes records instead of tasks."""
    assert public(fairlane.Client) - {"send"} <= public(BlockingClient)
    assert public(fairlane.Handle) <= public(BlockingHandle)


def test_the_page_on_observing_explains_every_event() -> None:
    assert set(first_cells("howto/observe.md", "## Events")) == {cls.__name__ for cls in Event.__subclasses__()}


def test_the_page_on_observing_explains_every_metric() -> None:
    registry = prometheus_client.CollectorRegistry()
    metrics = Metrics(fairlane.Events(), registry, queues=list, sessions=list, counters=dict)
    names = {family.name for family in registry.collect()}
    metrics.close()
    assert set(first_cells("howto/observe.md", "## Prometheus")) == names


def test_the_page_on_testing_explains_every_verb_of_a_lab() -> None:
    rows = tables_under(text_of(DOCS / "howto" / "testing.md"), "## In a lab")
    page = {name for row in rows for name in re.findall(r"lab\.(\w+)", row[0])}
    assert page == {"clock", *public(BlockingLab)} - {"close"}


# -- the command line ------------------------------------------------------------------------------------------------


def options_of(name: str) -> dict[str, click.Option]:
    command = command_line.get_command(click.Context(command_line), name)
    assert command is not None
    return {option.opts[-1]: option for option in command.params if isinstance(option, click.Option)}


def arguments_of(name: str) -> list[str]:
    command = command_line.get_command(click.Context(command_line), name)
    assert command is not None
    return [each.make_metavar(click.Context(command)) for each in command.params if isinstance(each, click.Argument)]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_reference_of_the_command_line_has_each_option_and_no_other(name: str) -> None:
    heading = " ".join(["## fairlane", name, *arguments_of(name)])
    page = [set(re.findall(r"`(-[\w-]+)", row[0])) for row in tables_under(text_of(DOCS / "cli.md"), heading)]
    own = [option for main, option in options_of(name).items() if main not in EVERYWHERE]
    assert page == [{*option.opts, *option.secondary_opts} for option in own]


def test_the_reference_of_the_command_line_says_which_commands_lack_a_common_option() -> None:
    rows = tables_under(text_of(DOCS / "cli.md"), "## Options of almost every command")
    page = {re.findall(r"`(--[\w-]+)", row[0])[0]: set(re.findall(r"`(\w+)`", row[2])) for row in rows}
    assert page == {option: {name for name in COMMANDS if option not in options_of(name)} for option in EVERYWHERE}


def test_the_reference_of_the_command_line_has_no_command_that_is_gone() -> None:
    assert re.findall(r"^## fairlane (\w+)", text_of(DOCS / "cli.md"), re.MULTILINE) == list(COMMANDS)


# -- the environment -------------------------------------------------------------------------------------------------


def shown(value: Any) -> str:
    return f"{value:.0f}" if isinstance(value, float) and value.is_integer() else str(value)


def test_the_reference_of_the_configuration_has_each_variable_and_no_other() -> None:
    page = set(first_cells("configuration.md", "## Variables"))
    inside = set(first_cells("configuration.md", "## Set by Fairlane itself"))
    named = {
        name for path in SOURCE.rglob("*.py") for name in re.findall(r'"(FAIRLANE_[A-Z_]*[A-Z])"', text_of(Path(path)))
    }
    families = {PREFIX + field.upper() for field in Intervals.__struct_fields__} | {
        RETENTION + field.upper() for field in Retention.__struct_fields__
    }
    assert sorted(page) == sorted((named | families) - inside)
    assert inside <= named


@pytest.mark.parametrize(("prefix", "defaults"), [(PREFIX, Intervals()), (RETENTION, Retention())])
def test_the_reference_of_the_configuration_has_the_defaults_as_they_are(
    prefix: str, defaults: Intervals | Retention
) -> None:
    page = {
        row[0].strip("`"): row[1].strip("`") for row in tables_under(text_of(DOCS / "configuration.md"), "## Variables")
    }
    for field in defaults.__struct_fields__:
        assert page[prefix + field.upper()].replace(",", "") == shown(getattr(defaults, field)), field


def test_the_reference_of_the_configuration_has_the_defaults_of_a_worker_as_they_are() -> None:
    page = {
        row[0].strip("`"): row[1].strip("`") for row in tables_under(text_of(DOCS / "configuration.md"), "## Variables")
    }
    usual = Settings()
    assert page["FAIRLANE_URL"] == usual.url
    assert page["FAIRLANE_MAX_CONCURRENT_TASKS"] == str(usual.slots.total)
    assert page["FAIRLANE_POOL"] == usual.pool
    assert page["FAIRLANE_GRACE"] == shown(usual.grace)
