"""Records for tests."""

from __future__ import annotations

from typing import Any

from ems.http.address import Address
from ems.router.breaker import Breaker
from ems.router.choosing.chooser import Score
from ems.router.fleet import Instance, Role
from ems.router.observe.record import MODEL_SERVER, Hop, Record


def record(**facts: Any) -> Record:
    """A request that was prefilled, decoded and answered within a second, unless told otherwise."""
    one = Record("r-1", "POST", "/v1/completions", 100.0)
    usual = {
        "model": "m",
        "status": 200,
        "answered_status": 200,
        "attempts": 1,
        "input_tokens": 40,
        "output_tokens": 8,
        "prefix_tokens": 30,
        "prefill": "10.0.0.1:1",
        "decode": "10.0.0.2:2",
        "backend_type": MODEL_SERVER,
        "backend": "default/s",
        "server": "default/s",
        "route": "default/r",
        "upstream_model": "m",
        "entered": 100.1,
        "queued": 0.1,
        "prefill_sent": 100.2,
        "prefill_done": 100.4,
        "decode_sent": 100.45,
        "first_byte": 100.5,
        "ended": 101.0,
    }
    for name, value in (usual | facts).items():
        setattr(one, name, value)
    return one


def chosen(**facts: Any) -> Record:
    """A request that was decoded by one of two instances."""
    now = 0.0
    instances = [Instance(Role.DECODE, Address("10.0.0.2", port), Breaker(now, trusted=True)) for port in (2, 3)]
    scores = [Score(one, 10 * number, 40.0 * number, bool(number)) for number, one in enumerate(instances, 1)]
    one = record(**facts)
    hop = Hop(instances[0], scores, 100.2)
    hop.answered(200, 100.5)
    one.hops.append(hop)
    return one


def refused(**facts: Any) -> Record:
    """A request that no engine saw."""
    nothing = dict.fromkeys(("entered", "queued", "prefill_sent", "prefill_done", "decode_sent", "first_byte"), 0.0)
    texts = dict.fromkeys(("prefill", "decode", "backend", "server", "upstream_model"), "")
    counts = {"answered_status": 0, "attempts": 0, "output_tokens": 0, "prefix_tokens": 0}
    return record(**({"status": 429, "error_type": "rate_limit", **nothing, **texts, **counts} | facts))
