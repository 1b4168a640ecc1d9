from __future__ import annotations

from typing import Any

import pytest

from ems.errors import ConfigError
from ems.http.address import Address
from ems.router.admission.settings import AdmissionConfig
from ems.router.config import RouterConfig
from ems.router.observe.settings import ObserveConfig

ONE = Address("h", 1)
TWO = Address("h", 2)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"decodes": ()}, "No decode instance .* or --manifests, --kubeconfig or --in-cluster$"),
        ({"decodes": (ONE, TWO, ONE)}, "decode instance h:1 was given twice"),
        ({"prefills": (ONE, ONE)}, "prefill instance h:1 was given twice"),
        ({"port": -1}, "--port -1"),
        ({"port": 65536}, "--port 65536"),
        ({"max_retries": -1}, "--max-retries -1"),
        ({"retry_delay": -0.1}, "--retry-delay -0.1"),
        ({"retry_delay": float("nan")}, "--retry-delay nan"),
        ({"prefill_timeout": 0.0}, "--prefill-timeout 0.0"),
        ({"idle_timeout": float("inf")}, "--idle-timeout inf"),
        ({"connect_timeout": -1.0}, "--connect-timeout -1.0"),
        ({"drain_timeout": float("nan")}, "--drain-timeout nan"),
        ({"max_body_bytes": 0}, "--max-body-mib"),
    ],
)
def test_what_cannot_work_is_refused_by_the_flags_name(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RouterConfig(**{"decodes": (ONE,), **settings})


def test_one_engine_may_have_both_roles() -> None:
    assert RouterConfig(prefills=(ONE,), decodes=(ONE,)).prefills == (ONE,)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"decisions": -1}, "--debug-requests -1"),
        ({"access_log_output": "access.log"}, "--access-log-output .*: give --access-log text or json$"),
        (
            {"otlp_traces_endpoint": "collector:4318"},
            "--otlp-traces-endpoint 'collector:4318' is no URL: expected http",
        ),
    ],
)
def test_what_would_be_written_nowhere_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ObserveConfig(**settings)


@pytest.mark.parametrize(("running", "waiting"), [(0, 0), (7, 10), (3, 1)])
def test_workers_share_the_places(running: int, waiting: int) -> None:
    admission = AdmissionConfig(max_running=running, queue_size=waiting)
    whole = RouterConfig(decodes=(ONE,), workers=3, admission=admission)
    parts = [whole.share(number) for number in range(3)]

    assert sum(part.max_running for part in parts) == running
    assert {part.queue_size for part in parts} == {-(-waiting // 3)}
    assert all(part.max_running for part in parts) is bool(running)
