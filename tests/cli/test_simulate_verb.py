"""`ems simulate` as people and scripts call it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ems.cli import run

SMALL = ["--requests", "60", "--memory", "10GB", "--cluster", "10GB", "--hosts", "3"]


def test_data_goes_to_stdout_and_does_not_change(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for _ in range(2):
        assert run(["simulate", "made:conversations", *SMALL, "--lose", "1", "--lose-at", "5", "-o", "json"]) == 0
        shown.append(capsys.readouterr())

    assert shown[0].out == shown[1].out
    assert "simulated 60 requests" in shown[0].err
    found = json.loads(shown[0].out)
    assert found["plan"]["hosts"] == 3
    assert sum(found["run"]["shares"].values()) == pytest.approx(1)
    assert found["loss"]["refilled_after"] >= 0


def test_constants_of_the_network_are_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "made:conversations", *SMALL, "--rpc-latency", "0.25", "-o", "json"]) == 0

    plan = json.loads(capsys.readouterr().out)["plan"]
    assert plan["network"]["rpc_latency"] == 0.25


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    file = tmp_path / "figures.svg"

    assert run(["simulate", "made:conversations", *SMALL, "--lose", "1", "--lose-at", "5", "--plot", str(file)]) == 0

    assert file.read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["made:conversations", "--plot", "/nowhere/a.svg"], "cannot draw into /nowhere/a.svg"),
        (["made:nothing"], "no made-up traffic called 'nothing'"),
        (["made:conversations", "--lose", "20"], "--lose is 20"),
        (["made:conversations", "--routing", "nearest"], "nearest"),
        (["made:conversations", "--bandwidth", "0"], "--bandwidth"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["simulate", *arguments]) == 2

    shown = capsys.readouterr()
    assert shown.out == ""
    assert sentence in shown.err
    assert len(shown.err.splitlines()) == 1
