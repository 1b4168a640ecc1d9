"""Errors are the same on the other side of the wire."""

from __future__ import annotations

import pytest

from ems.errors import EmsError, NoSpace, PoolRefused, ProtocolError, StaleReference, Unauthorised, VersionMismatch
from ems.pool.protocol import coding
from ems.pool.protocol.messages import Refused


@pytest.mark.parametrize(
    "error",
    [ProtocolError, VersionMismatch, Unauthorised, NoSpace, StaleReference, PoolRefused],
    ids=lambda e: e.__name__,
)
def test_a_refusal_is_the_same_error_on_the_other_side(error: type[EmsError]) -> None:
    message = coding.refusal(error("because of this"))
    with pytest.raises(error, match="because of this") as caught:
        coding.raise_refusal(message)
    assert type(caught.value) is error


def test_a_refusal_of_a_later_version_is_still_a_refusal() -> None:
    with pytest.raises(PoolRefused, match="quota"):
        coding.raise_refusal(Refused("quota-of-the-future", "quota"))
