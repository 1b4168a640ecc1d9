"""A bucket without credentials says so, not where they were looked for."""

from __future__ import annotations

from ems.pool.tiers.object_store import _brief


def test_missing_credentials_are_called_so() -> None:
    looked_for = OSError("Error performing PUT http://169.254.169.254/latest/api/token in 2.1s, after 3 retries")
    assert "expected AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in _brief(looked_for)
    assert _brief(OSError("no such bucket\nmore")) == "no such bucket"
