"""What holds for all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Time says nothing on a machine that has other things to do; `timeout` in pyproject.toml ends what hangs.
settings.register_profile("ems", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ems")
