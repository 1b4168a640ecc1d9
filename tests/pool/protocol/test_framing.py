"""Frames are found whole wherever the stream is cut."""

from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.errors import ProtocolError
from ems.pool.protocol.coding import FrameReader


@given(st.lists(st.binary(max_size=50), max_size=8), st.lists(st.integers(0, 400), max_size=12))
def test_frames_are_found_wherever_the_stream_is_cut(bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(struct.pack(">I", len(body)) + body for body in bodies)
    bounds = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    reader, found = FrameReader(), []
    for start, end in itertools.pairwise(bounds):
        reader.feed(stream[start:end])
        found += list(reader.frames())
    assert found == bodies


def test_a_stream_in_single_bytes_is_a_stream() -> None:
    reader, found = FrameReader(), []
    for byte in struct.pack(">I", 3) + b"abc" + struct.pack(">I", 0) + struct.pack(">I", 1) + b"d":
        reader.feed(bytes([byte]))
        found += list(reader.frames())
    assert found == [b"abc", b"", b"d"]


def test_a_frame_above_the_limit_is_refused_by_its_first_bytes() -> None:
    reader = FrameReader(limit=10)
    reader.feed(struct.pack(">I", 10) + b"0123456789" + struct.pack(">I", 11))
    frames = reader.frames()
    assert next(frames) == b"0123456789"
    with pytest.raises(ProtocolError, match="a frame of 11 bytes, expected at most 10"):
        next(frames)
