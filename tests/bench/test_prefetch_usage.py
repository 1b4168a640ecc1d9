"""What the benchmark of prompts that a pool is told of refuses before it makes any."""

from __future__ import annotations

import sys

import pytest

from benchmarks import prefetch


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tokens", "255"], "--tokens is 255, expected at least 256"),
        (["--prefill", "nan"], "--prefill is nan, expected at least 0"),
        (["--folder", "/nonexistent"], "--folder /nonexistent is no folder"),
    ],
    ids=["tokens", "prefill", "folder"],
)
def test_what_cannot_be_measured(
    arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["prefetch.py", *arguments])

    with pytest.raises(SystemExit, match="2"):
        prefetch.main()

    assert f"error: {sentence}" in capsys.readouterr().err.splitlines()[-1]
