"""What ``ems clear`` says of what it could not take out."""

from __future__ import annotations

from typing import Any

from ems.cli.pages import _complaints, _sentence

VLLM = {"client_id": 3, "leases": 2, "reservations": 0, "pages": 5, "client": "vllm", "pid": 41, "tenant": "ann"}
TIERS = {"client_id": -1, "leases": 1, "reservations": 1, "pages": 1, "client": "the tiers", "pid": 7, "tenant": ""}


def test_who_holds_what_stays_is_said() -> None:
    report: dict[str, Any] = {"pinned": 2, "kept": 6, "held_by": [VLLM, TIERS]}
    pins, held = _complaints(report, dry_run=False)
    assert pins == "2 pages stay because of pins, `ems unpin NAMESPACE` ends them"
    vllm = "vllm (process 41, tenant ann): 2 leases on 5 pages"
    tiers = "the tiers (process 7): 1 lease and 1 reservation"
    assert held == f"6 pages stay, in use by {vllm}; {tiers} on 1 page; clear again after that"
    (unknown,) = _complaints({"pinned": 0, "kept": 1, "held_by": []}, dry_run=False)
    assert unknown.startswith("1 page stays, because pages that are pinned or came since continue them")


def test_what_is_pinned_was_meant_too() -> None:
    report: dict[str, Any] = {"namespaces": ["a"], "matched": 0, "removed": 0, "bytes": 0, "pinned": 5}
    assert _sentence(report, dry_run=False) == "cleared 0 of 5 pages in 1 namespace"
    assert _sentence(report, dry_run=True).endswith(
        "would clear 0 pages (0 B) in 1 namespace; 5 pages stay because of pins"
    )
