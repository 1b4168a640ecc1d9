"""The benchmark of routers measures what it is given, sees whether KV is handed over, refuses what cannot start."""

from __future__ import annotations

import json
import sys

import pytest

from ems.bench.router.contenders import parse_command
from ems.bench.router.load import LoadFailed, closed_loop, connect, request_of
from ems.bench.router.measure import RouterPlan
from ems.bench.router.stub import ANSWER, ENGINE_ID, EVENT, LAST_EVENT, Engine
from ems.cli import run
from ems.errors import ConfigError

SMALL = ["--requests", "40", "--connections", "4", "--streams", "2", "--chunks", "3", "--interval", "0"]


@pytest.mark.process
def test_it_measures_the_router_and_its_hand_off(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--rounds", "1", "--seconds", "0.1", "--rate", "100", "--memory-requests", "20", "--only", "ems"]

    assert run(["bench", "router", *SMALL, *flags, "-o", "json"]) == 0

    (row,) = json.loads(capsys.readouterr().out)["items"]

    assert row["name"] == "ems"
    assert row["handed_over"] is True
    assert row["request_rate"] > 0
    assert row["added_p99"] is not None
    assert len(row["memory"]) == 10


@pytest.mark.process
def test_a_router_that_does_not_start_is_one_line_with_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    command = f"broken={sys.executable} -c 'print(\"no licence\")' {{port}}"

    assert run(["bench", "router", *SMALL, "--only", "broken", "--proxy-command", command]) == 2

    said = capsys.readouterr().err.splitlines()[-1]

    assert "broken does not serve" in said
    assert "no licence" in said


@pytest.mark.parametrize("text", ["", "name", "name=", "=run {port}", "name=run"])
def test_a_command_needs_a_name_and_a_port(text: str) -> None:
    with pytest.raises(ConfigError, match="NAME=COMMAND"):
        parse_command(text)


@pytest.mark.parametrize("numbers", [{"rounds": 0}, {"chunks": 0}, {"rate": 0.0}, {"interval": -1.0}])
def test_a_plan_that_cannot_be_is_refused(numbers: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        RouterPlan(**numbers)  # type: ignore[arg-type]


async def test_stubs_hand_over_and_stream() -> None:
    engine = Engine(chunks=3, interval=0.0)
    port = await engine.start()
    try:
        for request, count in ((request_of(), 2), (request_of(stream=True), 3), (request_of(to_prefill=True), 4)):
            assert len(await closed_loop(port, request, 1, count)) == count
        await closed_loop(port, request_of().replace(b"hello hello h", ENGINE_ID), 1, 1)
    finally:
        engine.stop()

    assert (engine.prefills, engine.decodes, engine.handed_over) == (4, 6, 1)


async def test_both_framings_are_read_to_their_end() -> None:
    engine = Engine(chunks=2, interval=0.0)
    port = await engine.start()
    client = await connect(port)

    assert (await client.ask(request_of())).endswith(ANSWER)

    streamed = await client.ask(request_of(stream=True))

    assert streamed.count(EVENT) == 2
    assert streamed.endswith(LAST_EVENT + b"\r\n0\r\n\r\n")

    client.close()
    engine.stop()
    with pytest.raises(LoadFailed):
        await client.ask(request_of())
