"""The page that is told of prompts, and who tells it: a real server, a real sender, a tier below."""

from __future__ import annotations

import asyncio
import io
import json
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from ems.errors import ConfigError
from ems.http.address import Address
from ems.pool.http import prefetch, prefetch_client, prefetch_hints
from ems.pool.http.prefetch_client import PrefetchClient
from ems.pool.http.prefetch_hints import MOST_BYTES, MOST_PROMPT_TOKENS, HintOutcome, PoolNode
from ems.pool.http.server import HttpServer
from ems.pool.names import qualified
from ems.pool.service.prompts import Fetched, PromptFetcher
from ems.pool.service.storing import Steps
from ems.pool.tenants import scram
from ems.pool.tenants.gate import Gate
from ems.pool.tenants.scram import Credentials
from ems.pool.tenants.signed_requests import Challenge, Signed, sign
from tests.pool.tenants.people import registry_of
from tests.pool.tiers.administered import Administered, administered
from tests.pool.tiers.node_with_tier import NAME, stored
from tests.pool.tiers.test_prompt_fetching import FACTS, IDENTITY, PROMPT, keys_of

ENGINE = Address("10.0.0.1", 8000)
ANN, BOB = Credentials("ann", "ems_ann"), Credentials("bob", "ems_bob")
TOKEN = "secret"
BEARER = {"authorization": f"Bearer {TOKEN}"}
BODY = json.dumps({"model": "m", "tokens": PROMPT}).encode()


@pytest_asyncio.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Callable[..., Administered]]:
    async with administered(tmp_path) as make:
        yield make


@asynccontextmanager
async def serving(one: Administered, token: str = TOKEN) -> AsyncIterator[Address]:
    """Its HTTP server, with a prompt's pages in the tier and not in memory."""
    one.node.core.reasons.layouts.describe(NAME, FACTS)
    one.node.prompts = PromptFetcher(one.node.core, one.tier_manager)
    await stored(one, keys_of(IDENTITY))
    one.forget()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        task = asyncio.create_task(HttpServer(one.node, token=token).serve(listener))
        yield Address(*listener.getsockname())
        task.cancel()
        await asyncio.wait([task])


def secret(folder: Path, text: str) -> Path:
    path = folder / "key"
    path.write_text(f"{text}\n")
    path.chmod(0o600)
    return path


@asynccontextmanager
async def telling(node: PoolNode, key: Path | None = None) -> AsyncIterator[PrefetchClient]:
    async with PrefetchClient({ENGINE: node}) as one:
        if key is not None:
            one.load_key(key)
        yield one


async def post(
    address: Address, body: bytes = BODY, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, object], str]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"http://{address}/prefetch", data=io.BytesIO(body), headers=BEARER if headers is None else headers
        ) as answer,
    ):
        return answer.status, await answer.json(), answer.headers.get("www-authenticate", "")


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110  what is waited for has no event
            await asyncio.sleep(0.002)


def counts(one: PrefetchClient, number: int) -> Callable[[], bool]:
    return lambda: sum(one.counts.values()) == number


async def test_pages_come_up_by_what_is_told(bench: Callable[..., Administered], tmp_path: Path) -> None:
    one = bench()
    async with serving(one) as address, telling(PoolNode(address), secret(tmp_path, TOKEN)) as sender:
        sender.hint(Address("10.0.0.9", 8000), "m", PROMPT)
        assert not sender.counts, "that host's node is not known"
        sender.hint(ENGINE, "m", PROMPT)
        await one.until(lambda: one.present(keys_of(IDENTITY)) == 12)
        await one.until(counts(sender, 1))
        assert sender.counts == {HintOutcome.TAKEN: 1}


async def test_an_open_node_listens_to_bearers_of_its_token_alone(bench: Callable[..., Administered]) -> None:
    one = bench()
    async with serving(one) as address:
        for headers in ({}, {"authorization": "Bearer other"}, {"authorization": str(Signed("ann"))}):
            status, _, how = await post(address, headers=headers)
            assert (status, how) == (401, "Bearer")
        assert (await post(address))[:2] == (200, {"pages": 12, "coming": 12})
    async with serving(one, token="") as address:
        for headers in ({}, {"authorization": "Bearer "}):
            assert (await post(address, headers=headers))[0] == 401


async def test_a_tenant_has_its_own_pages_brought_up(bench: Callable[..., Administered], tmp_path: Path) -> None:
    one = bench()
    one.node.tenancy.gate = Gate(registry_of(ANN, BOB), 0, lambda count: b"n" * count)
    own = qualified("ann", NAME)
    async with serving(one) as address:
        core = one.node.core
        core.reasons.layouts.describe(own, FACTS)
        assert (await post(address))[0] == 401, "the administrator's token opens no tenant"
        async with telling(PoolNode(address, "ann"), secret(tmp_path, ANN.access_key)) as sender:
            sender.hint(ENGINE, "m", PROMPT)
            await one.until(counts(sender, 1))
            sender.hint(ENGINE, "m", PROMPT)
            await one.until(counts(sender, 2))
            assert sender.counts == {HintOutcome.TAKEN: 2}
        assert core.counters.prefetch_hints == 2
        assert one.present(keys_of(IDENTITY)) == 0, "those are nobody's on this node"
        async with telling(PoolNode(address, "bob"), secret(tmp_path, ANN.access_key)) as sender:
            sender.hint(ENGINE, "m", PROMPT)
            await one.until(counts(sender, 1))
            assert sender.counts == {HintOutcome.REFUSED: 1}
        assert core.counters.prefetch_hints == 2


async def test_a_tenant_that_the_node_gets_to_know_later_is_listened_to_then(
    bench: Callable[..., Administered], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the node asks for a signature with a salt that it makes up."""
    monkeypatch.setattr(prefetch_hints, "LONGEST_PAUSE", 0.0)
    one = bench()
    one.node.tenancy.gate = Gate(registry_of(BOB), 0, lambda count: b"n" * count)
    async with serving(one) as address, telling(PoolNode(address, "ann"), secret(tmp_path, ANN.access_key)) as sender:
        sender.hint(ENGINE, "m", PROMPT)
        await one.until(counts(sender, 1))
        one.node.tenancy.gate.replace(registry_of(ANN, BOB))
        for number in (2, 3):
            sender.hint(ENGINE, "m", PROMPT)
            await one.until(counts(sender, number))
        assert sender.counts[HintOutcome.TAKEN] >= 1


async def test_a_proof_is_good_for_one_body_and_one_life_of_the_node(bench: Callable[..., Administered]) -> None:
    one = bench()
    one.node.tenancy.gate = Gate(registry_of(ANN), 0, lambda count: b"n" * count)
    async with serving(one) as address:
        _, _, how = await post(address, headers={"authorization": str(Signed("ann"))})
        challenge = Challenge.parse(how)
        assert challenge is not None
        assert Challenge.parse((await post(address, headers={"authorization": str(Signed("nobody"))}))[2]) is not None

        def signature(nonce: bytes, body: bytes = BODY) -> dict[str, str]:
            key = scram.salted(ANN.access_key, challenge.salt, challenge.iterations)
            return {"authorization": str(sign("ann", key, nonce, body))}

        assert (await post(address, headers=signature(challenge.nonce)))[0] == 200
        assert (await post(address, BODY + b" ", headers=signature(challenge.nonce)))[0] == 401
        status, _, how = await post(address, headers=signature(b"of another life."))
        assert (status, Challenge.parse(how)) == (401, challenge)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"[]", 400),
        (b'{"tokens": [-1]}', 400),
        (b'{"tokens": [4294967296]}', 400),
        (b'{"tokens": ["a"]}', 400),
        (b'{"tokens": [1], "keys": []}', 400),
        (b'{"tokens": [%b1]}' % (b"1," * MOST_PROMPT_TOKENS), 400),
        (b'{"tokens": [1], "model": "\xff"}', 400),
        (b" " * (MOST_BYTES + 1), 413),
        (b'{"tokens": []}', 200),
        (b'{"tokens": [%b1]}' % (b"1," * (MOST_PROMPT_TOKENS - 1)), 200),
    ],
)
async def test_what_makes_no_sense_is_refused(bench: Callable[..., Administered], body: bytes, status: int) -> None:
    async with serving(bench()) as address:
        assert (await post(address, body))[0] == status


async def test_a_node_without_a_tier_says_so(
    bench: Callable[..., Administered], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = bench()
    async with serving(one) as address, telling(PoolNode(address), secret(tmp_path, TOKEN)) as sender:
        states, one.tier_manager.states = one.tier_manager.states, []
        for number in range(1, 4):
            sender.hint(ENGINE, "m", PROMPT)
            await one.until(counts(sender, number))
        one.tier_manager.states = states
    assert sender.counts == {HintOutcome.REFUSED: 1, HintOutcome.DROPPED: 2}
    [complaint] = [record.message for record in caplog.records if record.name == "ems.pool"]
    assert "no tier below memory" in complaint


async def test_one_prompt_at_a_time_is_worked_on_and_few_wait(
    bench: Callable[..., Administered], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "MOST_WAITING", 2)
    one, at_work, go_on = bench(), [0], asyncio.Event()

    def fetch(_tenant: str, _model: str, _tokens: Sequence[int]) -> Steps[Fetched]:
        at_work[0] += 1
        while not go_on.is_set():
            yield None
        return Fetched()

    async with serving(one) as address:
        monkeypatch.setattr(one.node.prompts, "fetch", fetch)
        first = asyncio.create_task(post(address))
        await one.until(lambda: at_work[0])
        others = [asyncio.create_task(post(address)) for _ in range(4)]
        await one.until(lambda: sum(task.done() for task in others) == 3)
        assert [(await task)[0] for task in others if task.done()] == [503] * 3
        assert at_work == [1]
        go_on.set()
        assert (await first)[0] == 200
        await asyncio.gather(*others)
        assert at_work == [2]


async def test_who_sends_a_prompt_slowly_or_not_at_all_keeps_nobody_out(
    bench: Callable[..., Administered], caplog: pytest.LogCaptureFixture
) -> None:
    one = bench()
    head = f"POST /prefetch HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\ncontent-length: {len(BODY)}\r\n\r\n"
    async with serving(one) as address:
        slow = [await asyncio.open_connection(*address) for _ in range(prefetch.MOST_WAITING + 1)]
        for _, writer in slow:
            writer.write(head.encode() + BODY[:-1])
            await writer.drain()
        assert (await post(address, b'{"tokens": []}'))[0] == 200
        for _, writer in slow[1:]:
            writer.close()
            await writer.wait_closed()
        reader, writer = slow[0]
        writer.write(BODY[-1:])
        assert (await reader.readline()).split()[1] == b"200"
        writer.close()
        assert (await post(address, b'{"tokens": []}'))[0] == 200
    assert not [record for record in caplog.records if record.exc_info]


async def test_one_tenant_takes_half_of_the_places(
    bench: Callable[..., Administered], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "MOST_WAITING", 4)
    one, go_on = bench(), asyncio.Event()
    one.node.tenancy.gate = Gate(registry_of(ANN, BOB), 0, lambda count: b"n" * count)

    def fetch(_tenant: str, _model: str, _tokens: Sequence[int]) -> Steps[Fetched]:
        while not go_on.is_set():
            yield None
        return Fetched()

    async with serving(one) as address:
        monkeypatch.setattr(one.node.prompts, "fetch", fetch)

        async def told(by: Credentials) -> int:
            challenge = Challenge.parse((await post(address, headers={"authorization": str(Signed(by.access_id))}))[2])
            assert challenge is not None
            key = scram.salted(by.access_key, challenge.salt, challenge.iterations)
            signed = sign(by.access_id, key, challenge.nonce, BODY)
            return (await post(address, headers={"authorization": str(signed)}))[0]

        asked = [asyncio.create_task(told(ANN)) for _ in range(4)]
        await one.until(lambda: sum(task.done() for task in asked) == 2)
        asked.append(asyncio.create_task(told(BOB)))
        go_on.set()
        assert sorted(await asyncio.gather(*asked)) == [200, 200, 200, 503, 503]


async def test_a_node_that_is_gone_costs_nothing_and_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # nobody listens
        async with telling(PoolNode(Address(*listener.getsockname())), secret(tmp_path, TOKEN)) as sender:
            for _ in range(20):
                sender.hint(ENGINE, "m", PROMPT)
            await until(counts(sender, 20))
            assert sender.counts == {HintOutcome.FAILED: 8, HintOutcome.DROPPED: 12}
    assert len([record for record in caplog.records if record.name == "ems.pool"]) == 1


async def test_a_node_that_does_not_answer_holds_up_no_end(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        async with telling(PoolNode(Address(*listener.getsockname()))) as sender:
            sender.hint(ENGINE, "m", PROMPT)
            listener.setblocking(False)
            connection, _ = await asyncio.get_running_loop().sock_accept(listener)
    with connection:
        assert not caplog.records, "it was under way and nobody waited for its end"


async def test_a_node_that_answers_too_late_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch_client, "WITHIN_SECONDS", 0.01)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        async with telling(PoolNode(Address(*listener.getsockname()))) as sender:
            sender.hint(ENGINE, "m", PROMPT)
            await until(counts(sender, 1))
            assert sender.counts == {HintOutcome.FAILED: 1}


def test_a_key_is_one_word_that_others_cannot_read(tmp_path: Path) -> None:
    one = PrefetchClient({})
    for text in ("", "two words", "é"):
        with pytest.raises(ConfigError, match="is no key"):
            one.load_key(secret(tmp_path, text))
    path = secret(tmp_path, "word")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        one.load_key(path)


def test_a_sender_says_nothing_of_its_key() -> None:
    assert "ems_key" not in repr(PrefetchClient({})) + repr(Credentials("ann", "ems_key"))
