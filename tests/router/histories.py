"""Histories of a whole router: clients, engines, operators, and what must hold of it whatever they do.

Everything is real but sockets and clocks (:mod:`tests.router.network`).  Each request names itself in its prompt, and
engines answer with tokens that name the request and count on from the prompt, so that a byte of another request, a
token that is lost and one that comes twice are all seen.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httptools
from prometheus_client import generate_latest

from ems.http.address import Address
from ems.http.server import Connection, Server
from ems.kthena.rate_limit import RateLimit, Unit
from ems.router.admission.limits import Kind
from ems.router.admission.settings import AdmissionConfig
from ems.router.app import Router
from ems.router.config import RouterConfig
from ems.router.fleet import Role
from tests.router.kthena.manifests import ROUTE, SERVER, documents, pod
from tests.router.network import NetworkLoop, Wire, connect
from tests.router.soundness import unsound

PORTS = (1, 2, 3)
ENDS_WITHIN = 400.0
"""Seconds in which everything that was asked has an end: all time-outs one after the other."""
IDLE_WITHIN = 200.0
"""Seconds after which no connection is left that nobody uses."""
PROPER = {
    429: {"rate_limit_exceeded", "too_many_waiting"},
    404: {"route_not_found", "model_server_not_found"},
    503: {"no_decode_server", "shutting_down", "overloaded", "recomputed"},
    504: {"decode_timeout", "request_timeout"},
    502: {"upstream_broken", "decode_timeout", "request_timeout", "shutting_down", "recomputed", "no_decode_server"},
}
"""The router's own errors; 502 are those in a stream that has begun."""


@dataclass(frozen=True)
class Fate:
    """What an engine does with a request that reaches it: its answer comes in pieces, of which some may be all."""

    deed: str = "answer"
    """``answer``, ``error``, or what happens after some pieces: ``close``, ``reset``, ``stall``, ``garbage``."""
    pieces: int = 0
    size: int = 100_000
    seconds: float = 0.0
    """Before the first piece."""
    framing: str = "sized"
    status: int = 500
    gives_up: int | None = None
    """After so many tokens, to be recomputed; only what came by a hand-off is."""


@dataclass(frozen=True)
class Ask:
    client: int = 0
    tokens: int = 3
    fat: bool = False
    stream: bool = False
    hands_over: bool = True
    old: bool = False
    """HTTP/1.0."""
    session: str = ""
    prefill: tuple[Fate, ...] = ()
    """What happens to its attempts; further ones are answered."""
    decode: tuple[Fate, ...] = ()


@dataclass(frozen=True)
class Leave:
    client: int = 0
    aborts: bool = True


@dataclass(frozen=True)
class Read:
    """A client takes its answers, or does not."""

    client: int = 0
    reads: bool = False


@dataclass(frozen=True)
class Turn:
    """An engine is ``up``, ``down`` (its connections are cut), ``unreachable`` or ``ill`` (says its health page)."""

    port: int = 1
    state: str = "down"


@dataclass(frozen=True)
class Change:
    port: int = 1
    role: Role = Role.DECODE
    adds: bool = False


@dataclass(frozen=True)
class Manifests:
    """What manifests say from now on; the router is told by SIGHUP."""

    prefills: tuple[int, ...] = (1, 2)
    decodes: tuple[int, ...] = (1, 2, 3)
    server: bool = True
    route: bool = True
    seconds: int = 100
    attempts: int = 2
    wrong: bool = False


@dataclass(frozen=True)
class Wait:
    seconds: float = 0.0


Step = Ask | Leave | Read | Turn | Change | Manifests | Wait


@dataclass(frozen=True)
class History:
    steps: tuple[Step, ...]
    kthena: bool = False
    max_running: int = 0
    limit: int | None = None
    """Tokens of prompts."""
    retries: int = 2
    drain: float | None = None
    """Seconds that requests which run after the last step get to end; None waits for all ends before."""


@dataclass
class Answer:
    """An answer as its client sees it."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    complete: bool = False


class Client(asyncio.Protocol):
    """One connection of a client, with what was asked on it and what came back."""

    wire: Wire

    def __init__(self) -> None:
        self._parser: Any = httptools.HttpResponseParser(self)
        self.asked: list[tuple[str, Ask | None]] = []
        self.answers: list[Answer] = []
        self.left = False
        self.deaf = False
        """Whether it ever stopped to take what is sent, so that it is given up at some time."""
        self.lost = False

    @property
    def settled(self) -> bool:
        return self.lost or (len(self.answers) == len(self.asked) and all(one.complete for one in self.answers))

    def ask(self, name: str, ask: Ask | None, path: str, body: dict[str, Any]) -> None:
        data, extra = json.dumps(body).encode(), f"x-session-id: {ask.session}\r\n" if ask and ask.session else ""
        version = "1.0" if ask and ask.old else "1.1"
        head = (
            f"POST {path} HTTP/{version}\r\nhost: r\r\nx-request-id: {name}\r\n{extra}content-length: {len(data)}\r\n"
        )
        self.asked.append((name, ask))
        self.wire.write(head.encode() + b"\r\n" + data)

    def read(self, *, reads: bool) -> None:
        self.deaf = self.deaf or not reads
        self.wire.resume_reading() if reads else self.wire.pause_reading()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        if (
            self.answers
            and error is None
            and not self.answers[-1].headers.keys() & {"content-length", "transfer-encoding"}
        ):
            self.answers[-1].complete = True

    def on_message_begin(self) -> None:
        self.answers.append(Answer())

    def on_header(self, name: bytes, value: bytes) -> None:
        self.answers[-1].headers[name.decode().lower()] = value.decode()

    def on_headers_complete(self) -> None:
        self.answers[-1].status = self._parser.get_status_code()

    def on_body(self, piece: bytes) -> None:
        self.answers[-1].body += piece

    def on_message_complete(self) -> None:
        self.answers[-1].complete = True


class Engine:
    """Answers requests by their fates; all engines share those."""

    def __init__(self, fates: dict[tuple[str, Role], list[Fate]], wrong: list[str]) -> None:
        self.fates = fates
        self.wrong = wrong
        self.ill = False
        self.wires: set[Wire] = set()

    def cut(self) -> None:
        for wire in self.wires:
            wire.abort()


class Served(asyncio.Protocol):
    """A connection to an engine."""

    wire: Wire

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._parser: Any = httptools.HttpRequestParser(self)
        self._body = b""
        self._path = b""
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: Any) -> None:
        self.wire = transport
        self._engine.wires.add(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._engine.wires.discard(self.wire)
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._body = self._path = b""

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_body(self, piece: bytes) -> None:
        self._body += piece

    def on_message_complete(self) -> None:
        if self._path == b"/health":
            status = 503 if self._engine.ill else 200
            self.wire.write(b"HTTP/1.1 %d X\r\ncontent-length: 0\r\n\r\n" % status)
        else:
            self._task = asyncio.get_running_loop().create_task(self._answer(json.loads(self._body)))

    async def _answer(self, asked: dict[str, Any]) -> None:
        name, *done = asked["prompt"].split()
        params = asked.get("kv_transfer_params") or {}
        role = Role.PREFILL if params.get("do_remote_decode") else Role.DECODE
        place = f"{name}/{len(done)}"
        if done != [token(name, number) for number in range(len(done))]:
            self._engine.wrong.append(f"{name} is to go on from {done}")
        if params.get("remote_engine_id") not in (None, place):
            self._engine.wrong.append(f"{place} is decoded with the hand-off of {params}")
        fates = self._engine.fates[name, role]
        fate = fates.pop(0) if fates else Fate()
        if role is Role.PREFILL:
            kept = {"remote_engine_id": place} if asked["user"] == "hands over" else None
            kind, body = "application/json", json.dumps({"id": name, "kv_transfer_params": kept})
        else:
            kind, body = decoded(name, len(done), asked, fate.gives_up if params else None)
        whole = answer(name, kind, body.encode(), fate)
        pieces = [whole[place : place + fate.size] for place in range(0, len(whole), fate.size)]
        if fate.deed not in ("answer", "error"):
            pieces = pieces[: fate.pieces]
        if fate.deed == "garbage" and len(pieces) * fate.size < len(whole):
            pieces = []  # amid an answer nobody could tell
        await asyncio.sleep(fate.seconds)
        for piece in pieces:
            self.wire.write(piece)
            await asyncio.sleep(0)
        unseen = fate.framing == "until close" and fate.deed in ("close", "garbage")
        if fate.deed == "reset" or unseen:  # by an end nobody could tell that something is missing
            self.wire.abort()
        elif fate.deed == "garbage":
            self.wire.write(b"\0garbage")
            self.wire.close()
        elif fate.deed == "close" or (fate.deed != "stall" and fate.framing == "until close"):
            self.wire.close()


def token(name: str, number: int) -> str:
    return f"{name}.{number}"


def text(name: str, first: int, last: int, pad: int) -> list[str]:
    return [token(name, number) + " " * (1 + pad) for number in range(first, last)]


def decoded(name: str, first: int, asked: dict[str, Any], gives_up: int | None) -> tuple[str, str]:
    """What an engine says from a token on; one that gives up, in the way of vLLM-Ascend."""
    last = first + asked["max_tokens"] if gives_up is None else first + min(gives_up, asked["max_tokens"] - 1)
    said = text(name, first, last, asked["seed"])
    end = {"stop_reason": None if gives_up is None else "recomputed"}
    if not asked["stream"]:
        usage = {"prompt_tokens": 1 + first, "completion_tokens": len(said)}
        choices = [{"index": 0, "text": "".join(said), **end}]
        return "application/json", json.dumps({"id": name, "choices": choices, "usage": usage})
    events = [{"id": name, "choices": [{"index": 0, "text": one}]} for one in said]
    events.append({"id": name, "choices": [{"index": 0, "text": "", **end}]})
    return "text/event-stream", "".join(f"data: {json.dumps(one)}\n\n" for one in events) + "data: [DONE]\n\n"


def answer(name: str, kind: str, body: bytes, fate: Fate) -> bytes:
    status = 200
    if fate.deed == "error":
        status, kind, body = fate.status, "application/json", json.dumps({"error": name}).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\n"
    if fate.framing == "sized":
        head += f"content-length: {len(body)}\r\n"
    elif fate.framing == "chunked":
        head += "transfer-encoding: chunked\r\n"
        chunks = [body[place : place + 50] for place in range(0, len(body), 50)]
        body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    return head.encode() + b"\r\n" + body


class World:
    """A router with all that is around it."""

    def __init__(self, history: History, folder: Path, loop: NetworkLoop) -> None:
        self._history = history
        self._loop = loop
        self._manifests = folder / "all.yaml"
        self.wrong: list[str] = []
        self._fates: dict[tuple[str, Role], list[Fate]] = defaultdict(list)
        self._engines = {port: Engine(self._fates, self.wrong) for port in PORTS}
        for port in PORTS:
            self._turn(port, "up")
        where = [Address("127.0.0.1", port) for port in PORTS]
        self._write(Manifests())
        limit = None
        if history.limit is not None:
            limit = RateLimit(input_tokens_per_unit=history.limit, unit=Unit.MONTH)
        config = RouterConfig(
            prefills=() if history.kthena else tuple(where[:2]),
            decodes=() if history.kthena else tuple(where),
            manifests=folder if history.kthena else None,
            max_retries=history.retries,
            connect_timeout=1.0,
            prefill_timeout=20.0,
            idle_timeout=15.0,
            admission=AdmissionConfig(max_running=history.max_running, queue_size=2, queue_timeout=9.0, limit=limit),
        )
        self.router = Router(config)
        self._server: Server
        self._clients: dict[int, Client] = {}
        self.connections: list[Client] = []

    async def run(self) -> None:
        """Live through the history; raise AssertionError where something does not hold."""
        upstream = self.router._upstream
        async with self.router:
            self._server = Server(self.router, body_timeout=9.0)
            for step in self._history.steps:
                await self._do(step)
                assert unsound(self.router.fleet) == []
            if self._history.drain is None:
                await self._until(lambda: all(one.settled for one in self.connections), ENDS_WITHIN, "ends")
                await self._recover()
                await self._until(lambda: not self._server.connections, IDLE_WITHIN, "idle connections are closed")
            self._server.drain()
            await self._server.drained(self._history.drain or 0.0)
            await self._until(lambda: not self._server.connections, 1.0, "what was drained has ended")
            self._check()
        assert not upstream._open, "connections to engines are closed"
        await self._until(lambda: asyncio.all_tasks() == {asyncio.current_task()}, 1.0, "no task is left")
        for client in self.connections:
            self._check_answers(client)
        assert self.wrong == []

    async def _do(self, step: Step) -> None:
        match step:
            case Ask():
                self._ask(step)
            case Leave(client, aborts) if client in self._clients:
                leaving = self._clients.pop(client)
                leaving.left = True
                leaving.wire.abort() if aborts else leaving.wire.close()
            case Read(client, reads) if client in self._clients:
                self._clients[client].read(reads=reads)
            case Turn(port, state):
                self._turn(port, state)
            case Change(port, role, adds):
                body = {"type": role, "instances": [f"127.0.0.1:{port}"]}
                self._connect().ask("-", None, f"/instances/{'add' if adds else 'remove'}", body)
            case Manifests():
                self._write(step)
                self.router.reload()
            case Wait(seconds):
                await asyncio.sleep(seconds)

    def _connect(self) -> Client:
        client = Client()
        client.wire = connect(self._loop, client, Connection(self._server))
        self.connections.append(client)
        return client

    def _ask(self, ask: Ask) -> str:
        client = self._clients.get(ask.client)
        if client is None or client.lost or ask.old or any(one is not None and one.old for _, one in client.asked):
            client = self._clients[ask.client] = self._connect()
        name = f"r{sum(len(one.asked) for one in self.connections)}"
        self._fates[name, Role.PREFILL] += ask.prefill
        self._fates[name, Role.DECODE] += ask.decode
        body = {"model": "kimi-k25", "prompt": name + " " * 100, "stream": ask.stream, "max_tokens": ask.tokens}
        body |= {"user": "hands over" if ask.hands_over else "", "seed": 3000 if ask.fat else 0}
        client.ask(name, ask, "/v1/completions", body)
        return name

    def _turn(self, port: int, state: str) -> None:
        engine = self._engines[port]
        engine.ill = state == "ill"
        self._loop.listening.pop(port, None)
        if state == "unreachable":
            self._loop.listening[port] = None
        elif state != "down":
            self._loop.listening[port] = lambda: Served(engine)
        else:
            engine.cut()

    def _write(self, state: Manifests) -> None:
        texts = ["kind: ["] if state.wrong else []
        if state.server:
            policy = f"timeout: {state.seconds}s\n    retry: {{attempts: {state.attempts}, retryInterval: 1ms}}"
            texts.append(SERVER.replace("timeout: 10s", policy))
        if state.route:
            texts.append(ROUTE)
        for role, numbers in (("prefill", state.prefills), ("decode", state.decodes)):
            texts += [pod(f"{role[0]}{number}", role, number, group=f"g{number % 2}") for number in numbers]
        self._manifests.write_text(documents(*texts))

    async def _until(self, holds: Any, seconds: float, what: str) -> None:
        end = self._loop.time() + seconds
        while not holds():
            assert self._loop.time() < end, f"{what}: not within {seconds} s"
            await asyncio.sleep(0.25)

    async def _recover(self) -> None:
        """When all is mended, a request is answered as if nothing had been."""
        for port in PORTS:
            self._turn(port, "up")
        await self._do(Manifests())
        await self._do(Change(1, Role.DECODE, adds=True))
        await asyncio.sleep(30)
        self._clients.clear()
        self._ask(Ask())
        await self._until(lambda: self._clients[0].settled, 10.0, "the router works again")
        status = self._clients[0].answers[0].status
        assert status == 200 or (status == 429 and self._history.limit is not None)

    def _check(self) -> None:
        """Everything that counts what is going on counts nothing."""
        router = self.router
        everyone = [one for role in Role for one in router.fleet.listed(role)]
        assert unsound(router.fleet) == []
        assert router.fleet.leaving() == []
        assert all(one.load == one.queued == one.running == 0 for one in everyone)
        assert router.chooser._bits.keys() <= set(everyone), "prefixes of an instance that is gone are forgotten"
        gate = router.admission.gate
        assert (gate.queue.running, gate.queue.waiting, gate.queue._lanes, gate._waiting) == (0, 0, {}, {})
        assert not router.observer.active
        assert not self._server.connections
        for collector in router._metrics:
            for line in generate_latest(collector).decode().splitlines():
                if "_running" in line or "_active_" in line or "queue_size" in line or "inflight" in line:
                    assert line.startswith("#") or line.endswith(" 0.0"), line
        if self._history.limit is not None:
            series = router.observer.series.by_labels
            used = sum(one.input_tokens for labels, one in series.items() if labels.status_code == "200")
            left = gate.limits.left(self._loop.time()).get(("router", Kind.INPUT), float(self._history.limit))
            back = self._history.limit * self._loop.time() / Unit.MONTH.seconds
            assert self._history.limit - used - 1 <= left <= self._history.limit - used + back + 1

    def _check_answers(self, client: Client) -> None:
        """One answer a request, in their order; where there are fewer, the client knows why."""
        assert len(client.answers) <= len(client.asked)
        for (name, ask), one in zip(client.asked, client.answers, strict=False):
            if not one.status:
                continue
            if one.headers["x-request-id"] != name:
                raise AssertionError(f"{name} has the answer of {one.headers['x-request-id']}")
            if ask is None:
                assert (one.status, one.complete) in ((200, True), (404, True)), one
            else:
                said = check_answer(name, ask, one)
                cuts = any(isinstance(step, Turn) and step.state == "down" for step in self._history.steps)
                slow = any(fate.deed == "stall" or fate.seconds > 15 for fate in ask.decode)
                assert said != "decode_timeout" or slow, "no engine was silent"
                cuts = cuts or any(fate.deed in ("close", "reset", "garbage") for fate in ask.decode)
                assert said != "upstream_broken" or cuts, "no engine broke off"
        if client.left or client.deaf or self._history.drain is not None:
            return
        whole = [one for one in client.answers if one.complete]
        if len(whole) < len(client.asked):
            assert client.lost, "somebody waits for an answer"
            last = client.answers[-1] if client.answers else Answer()
            broken = client.answers and not last.complete and last.status == 200
            assert broken or last.headers.get("connection") == "close", "a connection that ends without a reason"


def check_answer(name: str, ask: Ask, one: Answer) -> str:
    """The answer is the request's own, and whole, or says that it is not; return the code of the router's error."""
    expected = "".join(text(name, 0, ask.tokens, 3000 if ask.fat else 0))
    if one.status != 200:
        if not one.complete:
            return ""
        said = json.loads(one.body)["error"]
        assert said == name or said["code"] in PROPER[one.status], said
        return "" if said == name else str(said["code"])
    if not ask.stream:
        assert not one.complete or json.loads(one.body)["choices"][0]["text"] == expected
        return ""
    *events, rest = one.body.decode().split("\n\n")
    if one.complete:
        assert (events.pop(), rest) == ("data: [DONE]", "")
    said = ""
    for number, event in enumerate(events):
        left = len(events) - 1 - number
        try:
            value = json.loads(event.removeprefix("data: ") or "{}")
        except ValueError:  # an event at which the engine broke off, ended by the router; or the last one
            assert left <= 1, event
            continue
        if "error" in value:
            assert left == 0
            assert expected.startswith(said)
            assert value["error"]["code"] in PROPER[502]
            return str(value["error"]["code"])
        if value:
            assert value["id"] == name
            said += value["choices"][0]["text"]
    assert said == expected if one.complete else expected.startswith(said)
    return ""


def live(history: History, folder: Path) -> None:
    """Run a history; raise AssertionError where something does not hold."""
    defects: list[Any] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, NetworkLoop)
        loop.set_exception_handler(lambda _, context: defects.append(context))
        await World(history, folder, loop).run()

    with asyncio.Runner(loop_factory=NetworkLoop) as runner:
        runner.run(main())
    assert defects == []
