"""An answer that its engine gives up is gone on with: no token twice, none lost, and the client sees no seam."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from ems.engines.recompute import MOST_LEGS, CannotContinue, Generated
from tests.router.fakes import FakeEngine, prefilled, running

if TYPE_CHECKING:
    from tests.router.fakes import Handler

DONE = b"data: [DONE]\n\n"


def event(text: str, *, chat: bool = False, stop: str | None = None, end: str | None = None, name: str = "a") -> bytes:
    choice: dict[str, Any] = {"index": 0, "finish_reason": end, "stop_reason": stop}
    choice |= {"delta": {"content": text}} if chat else {"text": text}
    return b"data: " + json.dumps({"id": name, "choices": [choice]}).encode() + b"\n\n"


def texts(stream: bytes) -> list[str]:
    found: list[str] = []
    for one in stream.split(b"\n\n"):
        if one.startswith(b"data: {"):
            choices = json.loads(one[6:])["choices"]
            found.extend(choice.get("text") or choice.get("delta", {}).get("content", "") for choice in choices)
    return found


@given(st.data(), st.booleans())
def test_however_it_is_cut_each_token_crosses_once_and_the_signal_never(data: st.DataObject, chat: bool) -> None:
    words = data.draw(
        st.lists(st.sampled_from([" a", "é", "recomputed", "\n\n", ' "stop_reason"']), min_size=2, max_size=9)
    )
    at = data.draw(st.integers(0, len(words) - 1))
    last = data.draw(st.sampled_from(["", " last"]))
    legs = [
        b"".join(event(word, chat=chat) for word in words[:at])
        + event(last, chat=chat, stop="recomputed", end="stop")
        + DONE,
        b"".join(event(word, chat=chat, name="b") for word in words[at:]) + DONE,
    ]
    generated = Generated(chat=chat)
    got = b""
    for number, leg in enumerate(legs):
        cuts = sorted(data.draw(st.lists(st.integers(0, len(leg)), max_size=12)))
        for start, end in pairwise((0, *cuts, len(leg))):
            got += generated.feed(leg[start:end])
        got += generated.rest()

        assert generated.broken_off == (not number)

        if not number:
            field = "messages" if chat else "prompt"
            fields = {field: Raw(b'[{"role":"user","content":"p"}]' if chat else b'"p"'), "max_tokens": Raw(b"100")}
            following = generated.next_fields(fields)
            so_far = "".join(words[:at]) + last

            assert json.loads(bytes(following["max_tokens"])) == 100 - at - bool(last)
            if chat:
                assert json.loads(bytes(following["messages"]))[1:] == [{"role": "assistant", "content": so_far}]
                assert bytes(following["continue_final_message"]) == b"true"
            else:
                assert json.loads(bytes(following["prompt"])) == "p" + so_far

    assert "".join(texts(got)) == "".join(words[:at]) + last + "".join(words[at:])
    assert got.endswith(DONE)
    assert got.count(DONE) == 1
    assert not re.search(rb'"stop_reason": ?"recomputed"', got)


def test_without_the_signal_every_event_is_the_engines_own() -> None:
    generated = Generated(chat=False)
    pieces = [event(f" {number}") for number in range(100)] + [DONE]

    assert [generated.feed(piece) for piece in pieces] == pieces
    assert not generated.broken_off


@pytest.mark.parametrize("part", [{"tool_calls": [{"index": 0}]}, {"reasoning_content": "hm"}])
def test_what_is_more_than_text_cannot_be_continued(part: dict[str, Any]) -> None:
    generated = Generated(chat=True)
    choice = {"index": 0, "delta": part, "stop_reason": None}
    generated.feed(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
    generated.feed(event("", chat=True, stop="recomputed"))

    with pytest.raises(CannotContinue):
        generated.next_fields({"messages": Raw(b"[]")})


def test_a_prompt_of_token_ids_cannot_be_continued_by_text() -> None:
    generated = Generated(chat=False)
    generated.feed(event("x", stop="recomputed"))

    with pytest.raises(CannotContinue):
        generated.next_fields({"prompt": Raw(b"[1,2]")})


def test_engines_do_not_give_up_for_ever() -> None:
    generated = Generated(chat=False)
    for _ in range(MOST_LEGS - 1):
        generated.feed(event("x", stop="recomputed"))
        generated.next_fields({"prompt": Raw(b'"p"')})
    generated.feed(event("x", stop="recomputed"))

    with pytest.raises(CannotContinue, match="gave it up"):
        generated.next_fields({"prompt": Raw(b'"p"')})


def gives_up(*, chat: bool, stream: bool) -> tuple[Handler, list[Any]]:
    """An engine that gives the first request up after two words and completes the others."""
    asked: list[Any] = []

    async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
        asked.append(json.loads(body))
        first = len(asked) == 1
        if not stream:
            text, stop = ("one two", "recomputed") if first else (" three", None)
            said: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            usage = {"prompt_tokens": 5 if first else 7, "completion_tokens": 2 if first else 1, "total_tokens": 8}
            choice = {"index": 0, "stop_reason": stop, **said}
            return web.json_response({"id": "x", "choices": [choice], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        words = ["one", " two"] if first else [" three"]
        for word in words:
            await response.write(event(word, chat=chat))
        if first:
            mark = event("", chat=chat, stop="recomputed", end="stop")
            await response.write(mark[:-30])
            await response.write(mark[-30:])
        await response.write(DONE)
        return response

    return answer, asked


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_the_router_has_it_continued(chat: bool, stream: bool) -> None:
    answer, asked = gives_up(chat=chat, stream=stream)
    path = "/v1/chat/completions" if chat else "/v1/completions"
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "count"}]} if chat else {"prompt": "count:"}
    async with (
        FakeEngine(prefilled) as prefill,
        FakeEngine(answer) as decode,
        running([prefill.address], [decode.address]) as router,
    ):
        response = await router.post(path, json={"model": "m", "max_tokens": 10, "stream": stream, **prompt})
        body = await response.read()

    assert response.status == 200
    assert len(prefill.seen) == len(asked) == 2
    assert asked[1]["max_tokens"] == 8
    assert "kv_transfer_params" in asked[1]
    if chat:
        assert asked[1]["messages"][1:] == [{"role": "assistant", "content": "one two"}]
    else:
        assert asked[1]["prompt"] == "count:one two"
    if stream:
        assert texts(body) == ["one", " two", " three"]
        assert body.endswith(DONE)
        assert body.count(DONE) == 1
    else:
        whole = json.loads(body)
        choice = whole["choices"][0]

        assert (choice["message"]["content"] if chat else choice["text"]) == "one two three"
        assert whole["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}


async def test_what_cannot_be_continued_ends_with_an_error_event() -> None:
    answer, asked = gives_up(chat=False, stream=True)
    async with (
        FakeEngine(prefilled) as prefill,
        FakeEngine(answer) as decode,
        running([prefill.address], [decode.address]) as router,
    ):
        response = await router.post(json={"model": "m", "prompt": [1, 2, 3], "stream": True})
        body = await response.read()

    assert len(asked) == 1
    assert texts(body.partition(b'data: {"error"')[0]) == ["one", " two"]
    assert b'"code":"recomputed"' in body
    assert body.endswith(DONE)


@pytest.mark.parametrize(
    ("kind", "start"), [("application/json", b'{"choices":[{"text":"'), ("text/event-stream", b"data: ")]
)
async def test_an_answer_too_large_to_be_held_is_passed_on_and_blames_nobody(
    kind: str, start: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ems.router.relay.HELD_LIMIT", 1000)
    large = start + b"x" * 4000

    async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": kind})
        await response.prepare(request)
        for at in range(0, len(large), 100):
            await response.write(large[at : at + 100])
        return response

    async with (
        FakeEngine(prefilled) as prefill,
        FakeEngine(answer) as decode,
        running([prefill.address], [decode.address]) as router,
    ):
        response = await router.post("/v1/completions", json={"model": "m", "prompt": "a"})

        assert (response.status, await response.read()) == (200, large)
        assert len(decode.seen) == 1
        assert all(not instance.failures for instance in router.instances())


async def test_what_is_held_of_a_continued_answer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ems.router.relay.HELD_LIMIT", 1000)
    gives, asked = gives_up(chat=False, stream=True)

    async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
        if not asked:
            return await gives(request, body)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: " + b"x" * 4000)
        return response

    async with (
        FakeEngine(prefilled) as prefill,
        FakeEngine(answer) as decode,
        running([prefill.address], [decode.address], max_retries=0) as router,
    ):
        response = await router.post(json={"model": "m", "prompt": "a", "stream": True})
        body = await response.read()

    assert texts(body.partition(b'data: {"error"')[0]) == ["one", " two"]
    assert b"xxx" not in body
    assert body.endswith(DONE)
