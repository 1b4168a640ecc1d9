"""Whatever a request has room for has a bound, which is looked at before memory is spent on it."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from ems.errors import ProtocolError
from ems.pool.names import MAX_NAME
from ems.pool.protocol import coding, limits, messages

REQUESTS: tuple[type[messages.Message], ...] = messages.Request.__args__


def smallest(kind: inspect.Type) -> Any:
    """A value of ``kind`` with as little in it as there can be."""
    match kind:
        case inspect.IntType() | inspect.FloatType():
            return 0
        case inspect.BoolType():
            return False
        case inspect.StrType():
            return ""
        case inspect.BytesType():
            return bytes(kind.min_length or 0)
        case inspect.ListType():
            return []
        case inspect.DictType():
            return {}
        case inspect.NoneType() | inspect.LiteralType():
            return getattr(kind, "values", (None,))[0]
        case inspect.UnionType():
            return smallest(kind.types[0])
        case inspect.StructType():
            return struct_of(kind, {field.name: smallest(field.type) for field in kind.fields})
    raise AssertionError(kind)


def struct_of(kind: inspect.StructType, values: dict[str, Any]) -> Any:
    if not kind.array_like:
        return {kind.tag_field: kind.tag, **values}
    return [kind.tag, *values.values()] if kind.tag_field else list(values.values())


def sized(kind: inspect.Type, path: str) -> Iterator[tuple[str, inspect.Type]]:
    """All places in ``kind`` that have as much as one likes."""
    match kind:
        case inspect.StrType() | inspect.BytesType():
            yield path, kind
        case inspect.ListType():
            yield path, kind
            yield from sized(kind.item_type, f"{path}[]")
        case inspect.DictType():
            yield path, kind
            yield from sized(kind.key_type, f"{path}{{key}}")
            yield from sized(kind.value_type, f"{path}{{value}}")
        case inspect.UnionType():
            for one in kind.types:
                yield from sized(one, path)
        case inspect.StructType():
            for field in kind.fields:
                yield from sized(field.type, f"{path}.{field.name}")


def filled(kind: inspect.Type, most: int) -> Any:
    match kind:
        case inspect.StrType():
            return "x" * most
        case inspect.BytesType():
            return bytes(most)
        case inspect.ListType():
            return [smallest(kind.item_type)] * most
        case inspect.DictType():
            name = int if isinstance(kind.key_type, inspect.IntType) else str
            return {name(number): smallest(kind.value_type) for number in range(most)}
    raise AssertionError(kind)


def with_place(kind: inspect.Type, path: str, value: Any, here: str) -> Any:
    """The smallest value of ``kind``, but for ``value`` at ``path``."""
    if path == here:
        return value
    match kind:
        case inspect.ListType():
            return [with_place(kind.item_type, path, value, f"{here}[]")]
        case inspect.DictType():
            if path.startswith(f"{here}{{key}}"):
                return {with_place(kind.key_type, path, value, f"{here}{{key}}"): smallest(kind.value_type)}
            name = 0 if isinstance(kind.key_type, inspect.IntType) else "a"
            return {name: with_place(kind.value_type, path, value, f"{here}{{value}}")}
        case inspect.UnionType():
            inside = next(one for one in kind.types if path in dict(sized(one, here)))
            return with_place(inside, path, value, here)
        case inspect.StructType():
            values = {}
            for field in kind.fields:
                at = f"{here}.{field.name}"
                holds = path in dict(sized(field.type, at))
                values[field.name] = with_place(field.type, path, value, at) if holds else smallest(field.type)
            return struct_of(kind, values)
    raise AssertionError(kind)


PLACES = [
    (kind, path, place)
    for kind in REQUESTS
    for path, place in dict(sized(inspect.type_info(kind), kind.__name__)).items()
]
IDS = [path for _, path, _ in PLACES]


@pytest.mark.parametrize(("kind", "path", "place"), PLACES, ids=IDS)
def test_nothing_in_a_request_is_larger_than_its_bound(
    kind: type[messages.Message], path: str, place: inspect.Type
) -> None:
    most = getattr(place, "max_length", None)
    assert most is not None, f"{path} has no bound"
    assert most <= coding.MAX_FRAME
    body = msgspec.msgpack.encode(with_place(inspect.type_info(kind), path, filled(place, most + 1), kind.__name__))
    with pytest.raises(ProtocolError, match=f"(?i)expected .*{most}"):
        coding.decode_request(body)


@pytest.mark.parametrize(("kind", "path", "place"), PLACES, ids=IDS)
def test_a_frame_that_is_full_of_one_thing_costs_little_more_than_itself(
    kind: type[messages.Message], path: str, place: inspect.Type
) -> None:
    """Many small things are larger in memory than on the wire: they are counted before they are made."""
    most = coding.MAX_FRAME // 16 if isinstance(place, inspect.DictType) else coding.MAX_FRAME - 64
    body = msgspec.msgpack.encode(with_place(inspect.type_info(kind), path, filled(place, most), kind.__name__))
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            coding.decode_request(body)
        assert tracemalloc.get_traced_memory()[1] < 2 * coding.MAX_FRAME
    finally:
        tracemalloc.stop()


def test_who_sends_too_much_is_told_before_it_is_sent() -> None:
    for message in (
        messages.Open("n" * 513, 4096),
        messages.Miss("n" * 513, 1),
        messages.Explain("n" * 513, b""),
        messages.Lookup(0, b"", request="r" * 257),
        messages.Describe("a", {str(number): "" for number in range(49)}),
        messages.Changes(0, ["a"] * 4097),
        messages.Commit(0, [0] * 65537),
    ):
        with pytest.raises(ProtocolError, match=r"Expected .* of length <="):
            coding.encode_request(message)


def test_the_page_on_the_wire_has_every_bound() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "protocol.md").read_text()
    table = page.split("## What is bounded")[1].split("\n## ")[0]
    named = {name for row in re.findall(r"^\| (.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    fields = {re.split(r"[\[{]", path.split(".")[-1])[0] for path in IDS}
    assert fields <= named, fields - named
    for most in (MAX_NAME, limits.MAX_ID, limits.MAX_NAMESPACES_ASKED, limits.MAX_KEYS):
        assert f"{most:,}" in table
