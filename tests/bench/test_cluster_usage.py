"""What the benchmark of two hosts refuses before it makes any."""

from __future__ import annotations

import sys

import pytest

from benchmarks import cluster


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--memory-gib", "1"], "--memory-gib is 1, expected at least 2"),
        (["--memory-gib", "0", "--parts", "ems"], "--memory-gib is 0, expected at least 1"),
        (["--page-mib", "0"], "argument --page-mib: invalid choice: 0"),
        (["--pairs", "0"], "--pairs is 0, expected at least 1"),
    ],
    ids=["memory", "none", "page", "pairs"],
)
def test_what_is_too_small(
    arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["cluster.py", *arguments])

    with pytest.raises(SystemExit, match="2"):
        cluster.main()

    assert f"error: {sentence}" in capsys.readouterr().err.splitlines()[-1]
