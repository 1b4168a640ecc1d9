"""Both sides speak the newest version that both know."""

from __future__ import annotations

import pytest

from ems.errors import VersionMismatch
from ems.pool.protocol import coding


@pytest.mark.parametrize(
    ("oldest", "newest", "version"), [(1, 1, 1), (1, 2, 2), (2, 2, 2), (1, 9, 3), (3, 3, 3), (0, 1, 1)]
)
def test_the_newest_common_version_is_spoken(oldest: int, newest: int, version: int) -> None:
    assert coding.negotiate(oldest, newest) == version


@pytest.mark.parametrize(("oldest", "newest"), [(4, 5), (0, 0), (4, 1), (-5, -1)])
def test_without_a_common_version_nothing_is_spoken(oldest: int, newest: int) -> None:
    with pytest.raises(VersionMismatch, match=f"speaks protocol versions {oldest} to {newest}, this node 1 to 3"):
        coding.negotiate(oldest, newest)
