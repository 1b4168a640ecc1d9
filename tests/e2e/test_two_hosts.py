"""Two hosts, each with a node and an engine, and a Mooncake master on a third: what one stored the other loads.

A link that is cut costs what is behind it, for as long as it is cut: every request ends, with the right text.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engines import (
    OPTIONS,
    READY_SECONDS,
    Node,
    Prompt,
    Reference,
    complete_all,
    connector,
    pool_directory,
    random_prompt,
    wait_for,
)
from tests.e2e.fleet import external_hits
from tests.kit.engine import VllmServer
from tests.kit.hosts import Host, Hosts
from tests.kit.mooncake import MooncakeMaster
from tests.kit.prepared import PreparedServer

pytestmark = pytest.mark.e2e

SIZE = "256MB"
TOKENS = 1100
"""Of a prompt, whose last block is not full."""
SLOW_MBIT = 10
"""At this rate the pages of eight prompts take longer than it takes to cut a link."""
RETURN_SECONDS = 240.0
"""For a tier that was cut out; the longer it was the rarer it is tried out."""


class Member:
    """A host with a node and an engine; whatever runs below :attr:`host` must be asked from there."""

    def __init__(self, host: Host, node: Node, engine: VllmServer) -> None:
        self.host = host
        self.node = node
        self.engine = engine

    def answer(self, prompts: Sequence[Prompt]) -> list[str]:
        with self.host.entered():
            return complete_all(self.engine.url, prompts)

    def hits(self) -> float:
        """Tokens that came from the pool until now."""
        with self.host.entered():
            return external_hits(self.engine)

    def tier(self) -> dict[str, Any]:
        figures = self.node.stats()["tiers"][0]
        assert isinstance(figures, dict)
        return figures

    def wait_written(self) -> None:
        """Return when all that the engine saved is in the cluster."""
        self.node.wait_stored()
        wait_for(lambda: self.tier()["queued_bytes"] == 0, "nothing waits to be written")


def start_member(
    host: Host,
    name: str,
    master: str,
    model: Path,
    logs: Path,
    stack: ExitStack,
    *,
    by_engine: bool = False,
    how: str = "",
) -> Member:
    """With ``by_engine`` the engine starts its node, and names no more than Mooncake's own file.

    ``how`` are settings of the tier.
    """
    settings = logs / f"{name}.json"
    settings.write_text(
        json.dumps(
            {
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": master,
                "global_segment_size": "256MB",
                "protocol": "tcp",
            }
        )
    )
    node = Node(stack.enter_context(pool_directory()), "--size", SIZE, "--tier", f"mooncake:{settings}?{how}")
    extra, environment = {}, node.environment
    if by_engine:
        extra = {"backend": "mooncake", "pool_size": SIZE}
        environment |= {"EMS_AUTOSTART": "1", "MOONCAKE_CONFIG_PATH": str(settings)}
    engine = PreparedServer(
        model,
        log=logs / f"{name}.log",
        kv_transfer_config=connector("kv_both", tier_timeout_ms=15_000, **extra),
        options=OPTIONS,
        environment={**environment, "VLLM_HOST_IP": "127.0.0.1"},
    )
    with host.entered():
        if by_engine:
            stop = [sys.executable, "-m", "ems.cli", "stop", "--socket", str(node.socket)]
            stack.callback(subprocess.run, stop, check=False, timeout=30)
        else:
            stack.callback(node.stop)
            node.start()
        stack.callback(engine.stop)
        engine.start()
    return Member(host, node, engine)


@pytest.fixture(scope="module")
def members(model: Path, logs: Path) -> Iterator[tuple[Member, Member]]:
    with Hosts(3) as network, ExitStack() as stack:
        third = network.hosts[2]
        with third.entered():
            master = stack.enter_context(MooncakeMaster(logs, address=third.address, name="mooncake"))
        one, other = network.hosts[:2]
        name, fetches = master.endpoint, "copy_ahead=never"  # what it answers comes over the link
        first = start_member(one, "host-0", name, model, logs, stack, by_engine=True)
        second = start_member(other, "host-1", name, model, logs, stack, how=fetches)
        for member in (first, second):
            with member.host.entered():
                member.engine.wait_ready(READY_SECONDS)
                member.node.wait_listening()
        yield first, second


def store(member: Member, prompts: Sequence[Prompt], expected: list[str]) -> None:
    """Have the cluster keep ``prompts`` in the memory of ``member``."""
    assert member.answer(prompts) == expected
    member.wait_written()


def load(member: Member, prompts: Sequence[Prompt], expected: list[str]) -> None:
    """Have ``member`` answer ``prompts`` from what another one stored, and compute none of them."""
    before = member.hits()
    assert member.answer(prompts) == expected
    assert member.hits() - before == sum(map(len, prompts))
    assert member.tier()["fetch_corrupt"] == 0


def test_what_one_host_stored_another_loads(members: tuple[Member, Member], reference: Reference) -> None:
    first, second = members
    prompts = [random_prompt(900, TOKENS)]
    expected = reference.texts(prompts)
    store(first, prompts, expected)
    load(second, prompts, expected)
    assert first.node.stats()["autostarted"] is True


@pytest.mark.parametrize("cut", [1, 0], ids=["of the host that loads", "of the host that stored"])
def test_link_is_cut_in_the_middle_of_loads(members: tuple[Member, Member], reference: Reference, cut: int) -> None:
    first, second = members
    prompts = [random_prompt(1000 + 20 * cut + number, TOKENS) for number in range(8)]
    expected = reference.texts(prompts)
    store(first, prompts, expected)
    cuts = second.tier()["cuts"]
    second.host.slow(SLOW_MBIT)
    try:
        with ThreadPoolExecutor(1) as thread:
            answers = thread.submit(second.answer, prompts)
            wait_for(lambda: second.tier()["fetching"] > 0, "pages are on their way")
            members[cut].host.cut()
            assert answers.result() == expected
        wait_for(lambda: second.tier()["cuts"] > cuts, "what was on its way is given up")
    finally:
        for member in members:
            member.host.heal()
    seeds = itertools.count(2000 + 1000 * cut)

    def hits_again() -> bool:
        # A call that was under way when the link healed may fail later, and the cluster be left alone for a moment.
        fresh = [random_prompt(next(seeds), TOKENS) for _ in range(2)]
        texts = reference.texts(fresh)
        store(first, fresh, texts)
        before = second.hits()
        assert second.answer(fresh) == texts
        return second.hits() - before == sum(map(len, fresh))

    wait_for(hits_again, "what one host stores the other loads again", RETURN_SECONDS)
    assert second.tier()["fetch_corrupt"] == 0
