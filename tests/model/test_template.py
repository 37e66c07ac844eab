"""Keys made of arguments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fairlane.errors import InvalidInput
from fairlane.model.template import Template

PARAMETERS = frozenset({"user", "order", "n"})


@pytest.mark.parametrize(
    ("text", "arguments", "key"),
    [
        ("user:{user}", {"user": "ann"}, "user:ann"),
        ("{user}/{n}", {"user": "ann", "n": 0}, "ann/0"),
        ("{order.customer.id}", {"order": SimpleNamespace(customer=SimpleNamespace(id=7))}, "7"),
        ("{order[customer]}", {"order": {"customer": "bob"}}, "bob"),
        ("{{literal}}:{user}", {"user": "ann"}, "{literal}:ann"),
        ("käufer:{user}", {"user": "ütz 😀"}, "käufer:ütz 😀"),
        ("{user}", {"user": "{n}"}, "{n}"),
        ("{user}", {"user": False}, "False"),
    ],
)
def test_a_template_is_filled_with_arguments(text: str, arguments: dict[str, Any], key: str) -> None:
    assert Template("lane", text, PARAMETERS).fill(arguments) == key


@pytest.mark.parametrize(
    "text",
    [
        "{usr}",
        "user:{}",
        "{0}",
        "user:{user",
        "user:}",
        "{user:>10}",
        "{user!r}",
        "",
        "two\nlines",
        "x" * 201,
        5,
        "{.a}",
    ],
)
def test_a_wrong_template_is_refused_when_the_task_is_made(text: Any) -> None:
    with pytest.raises(InvalidInput) as refused:
        Template("lane", text, PARAMETERS)
    assert refused.value.field == "lane"


def test_a_misspelt_parameter_is_reported_with_the_valid_ones() -> None:
    with pytest.raises(InvalidInput, match=r"refers to 'usr', which is not a parameter \(parameters: n, order, user\)"):
        Template("sticky", "{usr}", PARAMETERS)


@pytest.mark.parametrize(
    ("text", "arguments", "problem"),
    [
        ("{user}", {"user": None}, "argument 'user' is None"),
        ("{user}", {"user": ""}, "argument 'user' is ''"),
        ("{order}", {"order": {"password": "x"}}, "argument 'order' is a dict; use one of its items or attributes"),
        ("{order}", {"order": [1]}, "argument 'order' is a list"),
        ("{order.id}", {"order": None}, "argument 'order.id' cannot be read"),
        ("{order[id]}", {"order": {}}, "argument 'order\\[id\\]' cannot be read"),
        ("{user}", {"user": "two\nlines"}, "non-printable"),
        ("{user}", {"user": "x" * 201}, "longer than 200 bytes"),
    ],
)
def test_a_value_that_names_no_one_is_refused(text: str, arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        Template("lane", text, PARAMETERS).fill(arguments)


def test_a_key_without_places_is_the_same_for_every_call() -> None:
    assert Template("lane", "flux", PARAMETERS).constant
    assert not Template("lane", "{user}", PARAMETERS).constant
