"""Two hosts that copy from each other what is hot: step 3 of three is a hit in the own host's memory."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.engines import READY_SECONDS, Reference, random_prompt, wait_for
from tests.e2e.test_two_hosts import TOKENS, start_member
from tests.kit.hosts import Hosts
from tests.kit.mooncake import MooncakeMaster

pytestmark = pytest.mark.e2e

PAGES = 2 * 2 * 5
"""Of two prompts with two shards and four whole chunks and a part of one each; what was answered is used once."""


def test_what_one_host_used_again_another_loads_without_its_link(model: Path, logs: Path, reference: Reference) -> None:
    prompts = [random_prompt(seed, TOKENS) for seed in (4000, 4001)]
    expected = reference.texts(prompts)
    with Hosts(3) as network, ExitStack() as stack:
        third = network.hosts[2]
        with third.entered():
            master = stack.enter_context(MooncakeMaster(logs, address=third.address, name="mooncake-ahead"))
        first, second = (
            start_member(host, f"ahead-{number}", master.endpoint, model, logs, stack)
            for number, host in enumerate(network.hosts[:2])
        )
        for member in (first, second):
            with member.host.entered():
                member.engine.wait_ready(READY_SECONDS)
                member.node.wait_listening()
        assert first.answer(prompts) == expected
        first.wait_written()
        assert second.tier()["copied_ahead"] == 0, "it was used once"
        assert first.answer(prompts) == expected
        wait_for(lambda: second.tier()["pages_fetched"] == PAGES, "the other host has them")

        second.host.cut()
        before = second.hits()
        assert second.answer(prompts) == expected
        assert second.hits() - before == sum(map(len, prompts)), "also where prompts end, in the middle of a block"
        figures = second.tier()
        assert figures["copied_ahead_used"] == figures["copied_ahead"] == PAGES
        assert figures["fetch_corrupt"] == 0
