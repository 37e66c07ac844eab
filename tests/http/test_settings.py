"""Settings of the HTTP service are checked when they are made."""

from __future__ import annotations

import pytest

from fairlane import InvalidInput
from fairlane.http import HttpSettings


@pytest.mark.parametrize(
    "host", ["http://shop.example", "shop.example:8000", "shop.example/", "Shop.example", "::1", "[::1]:80", "*", ""]
)
def test_a_host_that_no_request_can_name_is_refused(host: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        HttpSettings(hosts=("localhost", host))
    assert refused.value.field == "hosts"
    assert repr(host) in refused.value.problem
    assert HttpSettings(hosts=("shop.example", "my_host-2", "127.0.0.1", "[::1]")).hosts
