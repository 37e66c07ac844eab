"""Groups, chords and chains: every part is a job, in the lane of its tenant."""

import pytest
from celery import chain, chord, group

from tests.sizes import sized

from .site import Site

pytestmark = pytest.mark.parametrize("pool", sized(["prefork"], ["prefork", "threads"]), indirect=True)


def test_group(site: Site) -> None:
    add = site.task("add")
    result = group(add.s(i, i) for i in range(10)).apply_async()
    assert result.get(timeout=30) == [2 * i for i in range(10)]
    assert {site.job(each.id).task for each in result} == {"shop.add"}


def test_chord(site: Site) -> None:
    add, total = site.task("add"), site.task("total")
    result = chord([add.s(i, 1) for i in range(8)], total.s()).apply_async()
    assert result.get(timeout=30) == sum(range(8)) + 8


def test_chain(site: Site) -> None:
    add = site.task("add")
    result = chain(add.s(1, 2), add.s(3), add.s(4)).apply_async()
    assert result.get(timeout=30) == 10


def test_a_chord_of_chains(site: Site) -> None:
    add, total = site.task("add"), site.task("total")
    result = chord([chain(add.s(i, 1), add.s(1)) for i in range(3)], total.s() | add.s(100)).apply_async()
    assert result.get(timeout=30) == 109


def test_lanes_are_inherited(site: Site) -> None:
    lane, publish, add = site.task("lane"), site.task("publish"), site.task("add")
    headers = {"tenant": "ann"}
    assert lane.apply_async(headers=headers).get(timeout=30) == "ann"
    assert site.app_result(publish.apply_async(headers=headers).get(timeout=30)) == "ann"
    first = add.signature((1, 2), headers=headers)
    assert chain(first, lane.s()).apply_async().get(timeout=30) == "ann"
    assert chord([first, first.clone()], lane.s()).apply_async().get(timeout=30) == "ann"
    assert lane.delay().get(timeout=30) is None
