"""What is given to verbs and makes no sense: one sentence, exit status 2, no stack trace and no word of a library."""

from __future__ import annotations

from pathlib import Path

import pytest

from ems.cli import run


@pytest.mark.parametrize(
    ("tokens", "sentence"),
    [
        (["show", "\udcff"], r"the argument \udcff is not in UTF-8, give another name"),
        (["tenant", "add", "a\udcff"], r"the argument a\udcff is not in UTF-8, give another name"),
        (["show", "x" * 1025], f"{'x' * 40}... has 1025 characters, expected a name of at most 1024"),
        (["resize", "99999999TB"], "size is '99999999TB', expected what a machine can have, at most 1048576.0 TiB"),
        (["resize", "-5GB"], "size is '-5GB', expected a number above 0 with a unit such as 1GB, 512MB or 64KB"),
        (["node", "--size", "-5GB"], "--size is '-5GB', expected a number above 0 with a unit such as 1GB"),
        (["router", "--workers", "1.5"], "--workers is '1.5', expected a whole number; see ems router --help"),
        (["router", "--port=8000.6"], "--port is '8000.6', expected a whole number; see ems router --help"),
        (["router", "--decoder-ports", "1", "2.0"], "--decoder-ports is '2.0', expected a whole number"),
        (["node", "--http-port", "9410.5"], "--http-port is '9410.5', expected a whole number"),
        (["bench", "ttft", "a", "b", "--seed", "0.5"], "--seed is '0.5', expected a whole number"),
        (["bench", "trace", "made:loop", "--requests", "0"], "--requests is 0, expected 1 or more"),
        (["bench", "trace", "made:loop", "--capacity", "²"], "--capacity is '²', expected whole numbers separated by"),
        (["bench", "trace", "made:loop", "--tier", "nan"], "a look-ahead and the rate of a tier are finite"),
        (["bench", "tier", "dir:/proc/none", "--page", "64KB"], "cannot write below /proc/none (No such file"),
        (["bench", "ttft", "a", "b", "--token-ids", "²-9"], "--token-ids is '²-9', expected FIRST-LAST such as"),
        (["explain", "--tokens", "/nonexistent"], "cannot read tokens from /nonexistent (No such file or directory)"),
    ],
    ids=[
        "bytes",
        "tenant",
        "long",
        "size",
        "negative",
        "negative-flag",
        "whole",
        "whole-joined",
        "whole-list",
        "whole-port",
        "whole-seed",
        "none",
        "capacity",
        "rate",
        "folder",
        "ids",
        "file",
    ],
)
def test_arguments(tokens: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tokens) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if not line.startswith("pages of")]
    assert (out, len(lines)) == ("", 1)
    assert lines[0].startswith(f"error: {sentence}")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"1 two 3", "has something else than token ids, expected a JSON list or numbers separated by spaces"),
        (b'[1, "two"]', "has something else than token ids, expected a JSON list or numbers separated by spaces"),
        (b"\xff\xfe", "is no text, expected a JSON list or numbers separated by spaces"),
        (b" ", "has no token ids, expected a JSON list or numbers separated by spaces"),
    ],
    ids=["word", "json", "bytes", "nothing"],
)
def test_files_of_tokens(content: bytes, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tokens"
    file.write_bytes(content)
    assert run(["explain", "--tokens", str(file)]) == 2
    assert capsys.readouterr().err == f"error: {file} {sentence}\n"
