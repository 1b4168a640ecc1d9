"""`ems bench ttft` as users call it, against servers of our own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from ems.cli import run
from ems.pool.client.pool_client import PoolClient
from tests.bench.openai_server import Behaviour, OpenAIServer

SMALL = ["--requests", "4", "--concurrency", "2", "--input-tokens", "16", "--output-tokens", "2"]


async def bench(*tokens: str) -> int:
    """Run the command beside the servers, which live in this event loop."""
    return await asyncio.to_thread(run, ["bench", "ttft", *tokens])


@pytest.fixture(autouse=True)
def no_node_of_this_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EMS_SOCKET", str(tmp_path / "node.sock"))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


async def test_json_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    async with OpenAIServer() as first, OpenAIServer() as second:
        assert await bench(first.url, f"{second.url}/v1", *SMALL, "--seed", "9", "-o", "json") == 0

    shown = capsys.readouterr()
    report = json.loads(shown.out)
    assert report["model"] == "tiny"
    assert report["plan"]["seed"] == 9
    assert report["pool"] is None
    assert [step["url"] for step in report["steps"]] == [first.url, first.url, second.url]
    assert [step["ttft"]["count"] for step in report["steps"]] == [4, 4, 4]
    assert "A to server 1, cold" in shown.err


async def test_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    async with OpenAIServer() as server:
        assert await bench(server.url, server.url, *SMALL) == 0

    shown = capsys.readouterr().out
    assert "4 requests, 2 at once" in shown
    assert shown.count("4/4") == 3


async def test_nothing_is_sent_for_a_while_before_the_third_step(monkeypatch: pytest.MonkeyPatch) -> None:
    rested, sleep = list[float](), asyncio.sleep

    async def record(seconds: float) -> None:
        rested.append(seconds)
        await sleep(0)

    async with OpenAIServer() as server:
        monkeypatch.setattr("ems.bench.ttft.asyncio.sleep", record)
        assert await bench(server.url, server.url, *SMALL, "--rest", "3600") == 0
    assert rested.count(3600.0) == 1


async def test_prompts_differ_from_run_to_run(capsys: pytest.CaptureFixture[str]) -> None:
    """A second run with the prompts of the first would find nothing cold."""
    seeds = []
    async with OpenAIServer() as server:
        for _ in range(2):
            await bench(server.url, server.url, *SMALL, "-o", "json")
            seeds.append(json.loads(capsys.readouterr().out)["plan"]["seed"])

    assert seeds[0] != seeds[1]


async def test_failed_requests_are_an_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    async with OpenAIServer() as first, OpenAIServer() as second:
        await bench(first.url, second.url, *SMALL, "--seed", "9")
        second.behaviour = Behaviour(fail_prompts=frozenset({second.prompts[-1]}))
        assert await bench(first.url, second.url, *SMALL, "--seed", "9") == 1

    assert "3/4" in capsys.readouterr().out


async def test_key_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret")
    async with OpenAIServer() as server:
        await bench(server.url, server.url, *SMALL)

    assert set(server.authorizations) == {"Bearer s3cret"}


async def test_figures_of_the_pool(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = iter([{"keys_hit": 3, "pages_committed": 10, "other": 1}, {"keys_hit": 7, "pages_committed": 12}])
    monkeypatch.setattr(PoolClient, "stats", lambda self: {"counters": next(figures)})
    (tmp_path / "node.sock").touch()
    async with OpenAIServer() as server:
        assert await bench(server.url, server.url, *SMALL, "-o", "json") == 0

    assert json.loads(capsys.readouterr().out)["pool"] == {"pages_committed": 2.0, "keys_hit": 4.0}


async def test_a_socket_without_a_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "node.sock").touch()
    async with OpenAIServer() as server:
        assert await bench(server.url, server.url, *SMALL, "-o", "json") == 0

    assert json.loads(capsys.readouterr().out)["pool"] is None


@pytest.mark.parametrize(
    ("tokens", "status", "message"),
    [
        (["ftp://h", "h"], 2, "URL1 is 'ftp://h', expected something like http://127.0.0.1:8000"),
        (["h:1", "http://"], 2, "URL2 is 'http://', expected something like http://127.0.0.1:8000"),
        (["h:1", "h:1", "--concurrency", "0"], 2, "--concurrency is 0, expected 1 or more"),
        (["h:1", "h:1", "--token-ids", "7"], 2, "--token-ids is '7', expected FIRST-LAST such as 300-999"),
        (["127.0.0.1:1", "h:1"], 1, "http://127.0.0.1:1 does not answer: connection refused"),
    ],
    ids=["url1", "url2", "concurrency", "ids", "dead"],
)
async def test_one_sentence(tokens: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await bench(*tokens) == status
    assert capsys.readouterr().err == f"error: {message}\n"
