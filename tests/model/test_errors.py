"""The tree of errors: every one is drawn where it belongs, and survives a copy to another process."""

import copy
import inspect
import re

import pytest

from fairlane import errors
from fairlane.errors import FairlaneError, IndexTaken, InvalidInput, QueueFull

ALL = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, BaseException) and kind.__module__ == errors.__name__
}
TWIG = re.compile(r"^    (?P<trunk>[│├└─ ]*)(?P<name>[A-Z][A-Za-z]+)(?: \((?P<also>\w+)\))?(?:  |$)")


def drawn() -> dict[str, tuple[str | None, str | None]]:
    """Read the tree in the module's docstring: name → (parent, standard exception)."""
    tree: dict[str, tuple[str | None, str | None]] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if found := TWIG.match(line):
            depth = len(found["trunk"]) // 4
            path[depth:] = [found["name"]]
            tree[found["name"]] = (path[depth - 1] if depth else None, found["also"])
    return tree


def test_the_tree_in_the_docstring_names_every_error_once() -> None:
    assert sorted(drawn()) == sorted(ALL)


@pytest.mark.parametrize("name", sorted(ALL))
def test_an_error_hangs_where_the_tree_draws_it(name: str) -> None:
    parent, also = drawn()[name]
    bases = {base.__name__ for base in ALL[name].__bases__}
    assert bases == {parent or "Exception", *([also] if also else [])}


@pytest.mark.parametrize("name", sorted(ALL))
def test_an_error_says_what_it_means(name: str) -> None:
    assert inspect.getdoc(ALL[name]) not in (None, inspect.getdoc(ALL[name].__bases__[0]))


def test_bad_input_names_its_field_and_the_problem() -> None:
    error = InvalidInput("lane", "must not be empty")
    assert (error.field, error.problem, str(error)) == (
        "lane",
        "must not be empty",
        "lane: must not be empty",
    )


def test_bad_input_can_be_caught_as_a_value_error() -> None:
    with pytest.raises(ValueError, match="lane: must not be empty"):
        raise InvalidInput("lane", "must not be empty")


@pytest.mark.parametrize(
    "error",
    [
        InvalidInput("lane", "must not be empty"),
        QueueFull("images is full", 2.5),
        QueueFull("images is full"),
        IndexTaken("pool/3 is taken", 7.0),
        *[kind("what happened") for kind in ALL.values() if kind.__init__ is FairlaneError.__init__],
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_copied_error_is_the_same(error: FairlaneError) -> None:
    again = copy.copy(error)
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_a_full_queue_and_a_taken_index_say_when_to_come_back() -> None:
    assert QueueFull("full", 2.5).retry_after == 2.5
    assert QueueFull("full").retry_after is None
    assert IndexTaken("taken", 7.0).retry_after == 7.0
