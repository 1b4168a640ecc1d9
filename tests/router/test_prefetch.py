"""Pools that are told of a prompt before an engine asks: whose, when, and what of that a request notices."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from aiohttp import web

from ems.http.address import Address
from ems.pool.client.answers import Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.http.prefetch_hints import LEAST_TOKENS, MOST_UNDER_WAY, PoolNode
from ems.pool.keys import KeyChain
from ems.pool.tenants.scram import Credentials
from ems.router.choosing.chooser import Chooser
from ems.router.choosing.prefix_index import Place, block_hashes
from ems.router.dispatch import Dispatch, Policy, Try
from ems.router.fleet import Fleet, Instance, Role
from ems.router.metrics import Counters
from ems.router.request import parse
from tests.kit.node import NodeProcess
from tests.kit.tiers import page
from tests.kit.waiting import until as until_true
from tests.pool.tenants.people import registry_of, save
from tests.pool.tiers.pages import read
from tests.pool.tiers.pages import save as stored
from tests.router.fakes import ANSWER, FakeEngine, completion, prefilled, running, until

PROMPT = list(range(1000, 1000 + 2 * LEAST_TOKENS))
BODY = json.dumps({"model": "m", "prompt": PROMPT}).encode()


def named(role: Role, port: int, fleet: Fleet) -> Instance:
    found = fleet.find(role, Address(role, port))
    assert found is not None
    return found


class Course:
    """One request over a fleet of two prefills and two decodes."""

    def __init__(self, *, prefills: int = 2, ahead: bool = True, together: bool = False, body: bytes = BODY) -> None:
        self.fleet, self.chooser = Fleet(), Chooser()
        for role, count in ((Role.PREFILL, prefills), (Role.DECODE, 2)):
            for port in range(1, count + 1):
                self.fleet.add(role, Address(role, port), 0.0, trusted=True)
        self.body = body
        self.policy = Policy(3, 0.001, together=together, ahead=ahead)

    def start(self) -> Dispatch:
        request = parse(self.body)
        prompt = request.prompt(block_tokens=self.chooser.block_tokens)
        return Dispatch(self.fleet, self.chooser, Counters(), request, prompt, self.policy)


def ahead(step: object) -> list[tuple[str, int]]:
    assert isinstance(step, Try)
    return [(one.role.value, one.address.port) for one in step.ahead]


def test_the_decode_that_it_would_be_is_told_of_while_the_prefill_computes() -> None:
    course = Course().start()
    assert ahead(course.start(0.0)) == [("prefill", 1), ("decode", 1)]
    assert ahead(course.prefill_answered(200, 1.0)) == [], "it was told of"
    course.close()


def test_another_decode_than_was_expected_is_told_of_too() -> None:
    made = Course()
    course = made.start()
    course.start(0.0)
    made.fleet.failed(named(Role.DECODE, 1, made.fleet), 0.5)
    assert ahead(course.prefill_answered(200, 1.0)) == [("decode", 2)]
    assert ahead(course.decode_broke(1.0)) == []
    course.close()


def test_a_prefill_that_is_tried_elsewhere_is_told_of_there() -> None:
    course = Course().start()
    course.start(0.0)
    assert ahead(course.prefill_broke(0.1)) == [("prefill", 2)]
    course.close()


def test_without_prefills_the_decode_is_told_of() -> None:
    course = Course(prefills=0).start()
    assert ahead(course.start(0.0)) == [("decode", 1)]
    course.close()


def test_both_of_a_pair_are_told_of() -> None:
    course = Course(together=True).start()
    step = course.start(0.0)
    assert isinstance(step, Try)
    assert step.prefill is not None
    assert (ahead(step.prefill), ahead(step)) == ([("prefill", 1)], [("decode", 1)])
    course.close()


def test_the_decode_is_of_the_group_of_the_prefill() -> None:
    made = Course()
    for role in Role:
        for port in (1, 2):
            made.fleet.belongs(role, Address(role, port), {"s": "ab"[port - 1]})
    made.policy = made.policy._replace(server="s")
    made.fleet.hold(named(Role.PREFILL, 1, made.fleet), 10_000, 10_000)
    course = made.start()
    assert ahead(course.start(0.0)) == [("prefill", 2), ("decode", 2)]
    course.close()


def test_what_an_engine_says_that_it_has_is_not_told_of() -> None:
    made = Course()
    names = block_hashes(PROMPT, 64, "")
    made.chooser.take_event([named(Role.DECODE, 1, made.fleet)], 64, Place.ENGINE, names, stored=True)
    made.chooser.take_event([named(Role.PREFILL, 1, made.fleet)], 64, Place.HOST, names, stored=True)
    course = made.start()
    assert ahead(course.start(0.0)) == [("prefill", 1)], "its host may have it on a disk"
    assert ahead(course.prefill_answered(200, 1.0)) == []
    course.close()


def test_what_was_sent_somewhere_may_have_left_it() -> None:
    made = Course(prefills=0)
    first = made.start()
    first.start(0.0)
    first.close()
    course = made.start()
    assert ahead(course.start(0.0)) == [("decode", 1)]
    course.close()


def test_short_prompts_are_not_told_of_nor_any_where_no_pool_is_known() -> None:
    short = json.dumps({"model": "m", "prompt": PROMPT[: LEAST_TOKENS - 1]}).encode()
    for course in (Course(body=short).start(), Course(ahead=False).start()):
        assert ahead(course.start(0.0)) == []
        course.close()


def test_a_choice_is_the_same_whether_pools_are_told_or_not() -> None:
    for made in (Course(ahead=True), Course(ahead=False)):
        course = made.start()
        step = course.start(0.0)
        assert isinstance(step, Try)
        assert [score.instance.role for score in step.considered] == [Role.PREFILL] * 2
        course.close()


@pytest.mark.parametrize(
    ("fields", "known"),
    [
        ({"prompt": [1, 2, 3]}, [1, 2, 3]),
        ({"prompt": "one two"}, []),
        ({"prompt": [[1, 2], [3]]}, []),
        ({"prompt": [1, "2"]}, []),
        ({"prompt": [1, -1]}, []),
        ({"prompt": [1, 2**32]}, []),
        ({"prompt": [0, 2**32 - 1]}, [0, 2**32 - 1]),
        ({"prompt": [1, 2, 3], "suffix": "x"}, []),
        ({"prompt": [1, 2, 3], "cache_salt": None}, [1, 2, 3]),
        ({"prompt": [1, 2, 3], "cache_salt": "x"}, []),
        ({"prompt": [1, 2, 3], "truncate_prompt_tokens": 2}, []),
        ({"prompt": [1, 2, 3], "prompt_embeds": "x"}, []),
        ({"messages": [{"role": "user", "content": "x"}]}, []),
        ({}, []),
    ],
)
def test_token_ids_are_those_of_a_prompt_that_is_nothing_else(fields: dict[str, object], known: list[int]) -> None:
    assert list(parse(json.dumps({"model": "m", **fields}).encode()).token_ids()) == known


class FakeNode:
    """Takes what it is told, at once or when a test says so."""

    def __init__(self, status: int = 200) -> None:
        self.told: list[dict[str, object]] = []
        self.go_on = asyncio.Event()
        self.go_on.set()
        self._status = status
        self.address = Address("127.0.0.1", 1)

    async def _take(self, request: web.Request) -> web.StreamResponse:
        self.told.append(await request.json())
        await self.go_on.wait()
        return web.json_response({"pages": 1, "coming": 1}, status=self._status)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[FakeNode]:
        app = web.Application()
        app.router.add_post("/prefetch", self._take)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.address = Address("127.0.0.1", runner.addresses[0][1])
        yield self
        self.go_on.set()
        await runner.cleanup()


async def test_the_decodes_node_hears_of_a_prompt_before_the_decode_does() -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(request: web.Request, body: bytes) -> web.StreamResponse:
        asked.set()
        await go_on.wait()
        return await prefilled(request, body)

    async with FakeEngine(slowly) as prefill, FakeEngine() as decode, FakeNode().serving() as node:
        nodes = {decode.address: PoolNode(node.address)}
        async with running([prefill.address], [decode.address], pool_nodes=nodes) as router:
            request = asyncio.create_task(router.post(data=BODY, headers={"X-Request-Id": "a"}))
            await asked.wait()
            await until(lambda: len(node.told) == 1)
            assert node.told == [{"model": "m", "tokens": PROMPT}]
            assert not decode.seen
            go_on.set()
            assert (await request).status == 200
            assert len(node.told) == 1
            explained = await (await router.get("/debug/requests/a")).json()
            attempts = explained["choice"]["attempts"]
            assert [one["prefetch_hints_to"] for one in attempts] == [[str(decode.address)], []]
            page = await (await router.get("/metrics")).text()
            assert 'ems_router_prefetch_hints_total{outcome="taken"} 1.0' in page


async def test_a_text_is_told_of_by_the_tokens_that_an_engine_says() -> None:
    async def saying(request: web.Request, body: bytes) -> web.StreamResponse:
        if request.path == "/tokenize":
            return web.json_response({"count": len(PROMPT), "max_model_len": 4096, "tokens": PROMPT})
        return await completion(request, body)

    async with FakeEngine(saying) as decode, FakeNode().serving() as node:
        nodes = {decode.address: PoolNode(node.address)}
        async with running([], [decode.address], pool_nodes=nodes, tokenize_within=20.0) as router:
            assert (await router.post(json={"model": "m", "prompt": "word " * len(PROMPT)})).status == 200
            assert (await router.post(json={"model": "m", "prompt": "short"})).status == 200
            await until(lambda: len(node.told) == 1)
    assert node.told == [{"model": "m", "tokens": PROMPT}]
    assert [one.path for one in decode.seen] == ["/tokenize", "/v1/completions", "/v1/completions"]


@pytest.mark.process
async def test_nothing_that_a_client_sends_has_a_node_left_alone(tmp_path: Path) -> None:
    """A node refuses what is no prompt or too large, and is told of nothing for a while then."""
    host = Host(tmp_path, None)
    with host.node:
        until_true(lambda: "http=http://" in host.node.log, "it says where it serves HTTP", 45)
        async with FakeEngine() as decode:
            nodes = {decode.address: host.http}
            async with running([], [decode.address], pool_nodes=nodes, pool_key=host.key) as router:
                for token in (-1, 1 << 32, (1 << 32) - 1, 1):
                    body = json.dumps({"model": "m", "prompt": [token] * (1 << 17)}).encode()
                    assert (await router.post(data=io.BytesIO(body))).status == 200
                counts = router.router.counters.hints
                await until(lambda: sum(counts.values()) == 2)
                assert counts == {"taken": 2}


async def test_a_node_that_hangs_or_refuses_costs_a_request_nothing() -> None:
    async with FakeEngine() as decode, FakeNode(status=401).serving() as node:
        node.go_on.clear()
        nodes = {decode.address: PoolNode(node.address)}
        async with running([], [decode.address], pool_nodes=nodes) as router:
            for _ in range(MOST_UNDER_WAY + 3):
                response = await router.post(data=BODY)
                assert (response.status, await response.read()) == (200, ANSWER)
            await until(lambda: len(node.told) == MOST_UNDER_WAY)
            page = await (await router.get("/metrics")).text()
            assert 'ems_router_prefetch_hints_total{outcome="dropped"} 3.0' in page
            node.go_on.set()


async def test_a_node_that_is_gone_costs_a_request_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        async with FakeEngine() as decode:
            nodes = {decode.address: PoolNode(Address(*nobody.getsockname()))}
            async with running([], [decode.address], pool_nodes=nodes) as router:
                for _ in range(5):
                    assert (await router.post(data=BODY)).status == 200
                await until(lambda: any("gets no prefetch hints" in record.message for record in caplog.records))
                assert (await router.post(data=BODY)).status == 200
    assert sum("gets no prefetch hints" in record.message for record in caplog.records) == 1


PAGE = 64 << 10
CHUNKS = 8
LONG = list(range(1, CHUNKS * LEAST_TOKENS + 1))
NAME = "default/m/layout/0.0"
FACTS = {"kind": "vllm", "tenant": "default", "model": "m", "chunk_tokens": "256", "page_shards": "1", "window": "0"}
ACME = Credentials("acme", "ems_of_acme")


def keys() -> list[bytes]:
    chain = KeyChain("default/m/layout", LEAST_TOKENS)
    chain.extend(LONG)
    return list(chain)


def secret(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


class Host:
    """A real node whose tier has a prompt's pages that its memory lost, and a client as its engine would be."""

    def __init__(self, folder: Path, credentials: Credentials | None) -> None:
        self.credentials = credentials
        self.tenant = "" if credentials is None else credentials.access_id
        self.key = secret(folder / "key", "token" if credentials is None else credentials.access_key)
        flags = ["--size", "16MB", "--segment-size", "4MB", "--http-port", "0", "--tier", f"dir:{folder}/tier"]
        if credentials is None:
            flags += ["--http-token-file", str(self.key)]
        else:
            save(folder / "tenants.json", registry_of(credentials))
            flags += ["--tenants", str(folder / "tenants.json")]
        self.node = NodeProcess(*flags)

    def tier(self, figure: str) -> int:
        return int(self.node.figures()["tiers"][0][figure])

    def lose(self) -> None:
        """Store the prompt's pages, wait until the tier has them, and start the node again without its memory."""
        self.node.wait_touched()
        with self.engine() as client:
            assert stored(client, Namespace(NAME, PAGE), keys()) == CHUNKS
            until_true(lambda: self.tier("pages_written") == CHUNKS, "the tier has them", 45)
        self.node.kill()
        shutil.rmtree(self.node.directory)
        self.node.start()
        self.node.wait_touched()
        until_true(lambda: self.tier("tier_pages") == CHUNKS, "the tier is known", 45)

    @contextmanager
    def engine(self) -> Iterator[PoolClient]:
        client = self.node.client(credentials=self.credentials)
        client.describe(NAME, FACTS)
        try:
            client.open(Namespace(NAME, PAGE))
            yield client
        finally:
            client.close()

    @property
    def http(self) -> PoolNode:
        return PoolNode(Address.parse(self.node.log.rpartition("http=http://")[2].split()[0]), self.tenant)


@pytest.mark.process
@pytest.mark.parametrize("credentials", [None, ACME], ids=["open", "tenants"])
async def test_pages_are_in_memory_before_the_decode_is_asked(tmp_path: Path, credentials: Credentials | None) -> None:
    """The whole way: a router, a prefill that computes, and the pages of a cold tier in the memory of decode's host."""
    host = Host(tmp_path, credentials)
    go_on = asyncio.Event()

    async def computing(request: web.Request, body: bytes) -> web.StreamResponse:
        await go_on.wait()
        return await completion(request, body)

    with host.node:
        await asyncio.to_thread(host.lose)
        with host.engine() as client:
            async with FakeEngine(computing) as prefill, FakeEngine() as decode:
                nodes = {decode.address: host.http}
                async with running([prefill.address], [decode.address], pool_nodes=nodes, pool_key=host.key) as router:
                    request = asyncio.create_task(router.post(json={"model": "m", "prompt": LONG}))
                    await asyncio.to_thread(until_true, lambda: host.tier("pages_fetched") == CHUNKS, "they came", 45)
                    assert not decode.seen
                    assert host.node.figures()["counters"]["lookups"] == 0, "nobody else asked for them"
                    assert read(client, Namespace(NAME, PAGE), keys()) == [page(one, PAGE) for one in keys()]
                    go_on.set()
                    assert (await request).status == 200
        assert host.node.figures()["counters"]["prefetch_hints"] == 1
