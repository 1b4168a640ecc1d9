"""What the benchmark of links refuses before it starts a node."""

from __future__ import annotations

import sys

import pytest
import torch

from benchmarks import link


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tokens", "100"], "--tokens is 100, expected at least 256"),
        (["--device", "foo"], "argument --device: invalid choice: 'foo'"),
        (["--device", "xpu"], "--device is xpu, which torch does not find here"),
    ],
    ids=["tokens", "unknown", "absent"],
)
def test_what_cannot_be_measured(
    arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["link.py", *arguments])
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)

    with pytest.raises(SystemExit, match="2"):
        link.main()

    assert f"error: {sentence}" in capsys.readouterr().err.splitlines()[-1]
