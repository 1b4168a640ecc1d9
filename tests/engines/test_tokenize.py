"""What an engine is asked for a prompt's token ids, and which of its answers count."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from ems.engines.tokenize import first_ids, token_ids_of, tokenize_body

TALK = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]
CHAT = "/v1/chat/completions"


def asked(path: str, **fields: Any) -> Any:
    body = tokenize_body(path, msgspec.json.decode(json.dumps(fields), type=dict[str, msgspec.Raw]))
    return None if body is None else json.loads(body)


def test_a_completion_is_asked_for_by_what_changes_its_tokens() -> None:
    given = {"model": "m", "prompt": "Hello", "add_special_tokens": False}

    assert asked("/v1/completions", **given, max_tokens=3, stream=True, echo=True) == given
    assert asked("/v1/completions", prompt=["Hello"]) == {"prompt": "Hello"}


def test_a_chat_is_asked_for_by_what_its_template_sees() -> None:
    given = {
        "model": "m",
        "messages": [*TALK, {"role": "user", "content": [{"type": "text", "text": "And?", "cache_control": {}}]}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "add_special_tokens": True,
        "chat_template": "{{ messages }}",
        "chat_template_kwargs": {"enable_thinking": False},
    }

    assert asked(CHAT, **given, prompt="passed over", temperature=0, documents=None, reasoning_effort=None) == given


@pytest.mark.parametrize(
    ("effort", "given", "thinks"),
    [("high", {}, True), ("none", {}, False), ("high", {"enable_thinking": False}, False)],
)
def test_what_an_engine_takes_for_an_answer_alone_reaches_the_template(
    effort: str, given: dict[str, Any], thinks: bool
) -> None:
    documents = [{"text": "Caches"}]
    body = asked(CHAT, messages=TALK, reasoning_effort=effort, documents=documents, chat_template_kwargs=given)

    kwargs = {"reasoning_effort": effort, "documents": documents, "enable_thinking": thinks}
    assert body == {"messages": TALK, "chat_template_kwargs": kwargs}


@pytest.mark.parametrize(
    ("said", "asked_for"),
    [
        ({"reasoning_content": "Hm"}, {"reasoning": "Hm"}),
        ({"reasoning_content": "Hm", "reasoning": None}, {"reasoning": "Hm"}),
        ({"reasoning_content": "Hm", "reasoning": "Aha"}, {"reasoning": "Aha"}),
        ({"reasoning_content": None}, {"reasoning_content": None}),
    ],
)
def test_what_an_assistant_thought_has_the_name_that_it_has_for_an_answer(
    said: dict[str, Any], asked_for: dict[str, Any]
) -> None:
    turn = {"role": "assistant", "content": "Hello"}
    assert asked(CHAT, messages=[*TALK, turn | said]) == {"messages": [*TALK, turn | asked_for]}


def test_a_field_that_says_nothing_is_none() -> None:
    nothing = dict.fromkeys(("cache_salt", "prompt_embeds", "truncate_prompt_tokens", "suffix"))
    assert asked("/v1/completions", prompt="Hello", **nothing) == {"prompt": "Hello"}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": [1, 2, 3]}),
        ("/v1/completions", {"prompt": [[1, 2, 3]]}),
        ("/v1/completions", {"prompt": ["one", "two"]}),
        ("/v1/completions", {"prompt": []}),
        ("/v1/completions", {"prompt": None}),
        ("/v1/completions", {"messages": TALK}),
        ("/v1/completions", {"prompt": "Hello", "cache_salt": "s"}),
        ("/v1/completions", {"prompt": "Hello", "prompt_embeds": "AAAA"}),
        ("/v1/completions", {"prompt": "Hello", "truncate_prompt_tokens": 5}),
        ("/v1/completions", {"prompt": "Hello", "suffix": "!"}),
        (CHAT, {"messages": TALK, "cache_salt": "s"}),
        (CHAT, {"messages": "Hello"}),
        (CHAT, {"messages": None}),
        (CHAT, {"messages": [{"content": [{"type": "image_url", "image_url": {"url": "http://a/b"}}]}]}),
        (CHAT, {"messages": [{"content": [{"image_url": "http://a/b"}]}]}),
        (CHAT, {"messages": [{"content": [{"type": "text", "text": "x"}, {"type": "input_audio"}]}]}),
        (CHAT, {"prompt": "Hello"}),
        ("/v1/responses", {"input": "Hello"}),
        ("/v1/embeddings", {"input": "Hello", "prompt": "Hello", "messages": TALK}),
        ("/tokenize", {"prompt": "Hello"}),
    ],
)
def test_nothing_is_asked_where_token_ids_are_there_or_do_not_say_all(path: str, fields: dict[str, Any]) -> None:
    assert asked(path, **fields) is None


def test_token_ids_are_read() -> None:
    assert token_ids_of(b'{"count":2,"max_model_len":9,"tokens":[7,4294967295],"token_strs":null}') == [7, 2**32 - 1]


@pytest.mark.parametrize(
    "answer",
    [
        *(b"", b"[]", b"{}", b'{"tokens":[]}', b'{"tokens":[-1]}', b'{"tokens":[4294967296]}', b'{"tokens":["a"]}'),
        b'{"x":' + b"[" * 100_000,
    ],
)
def test_an_answer_without_token_ids_is_said_to_be_none(answer: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        token_ids_of(answer)


def test_of_a_list_without_end_the_beginning_is_read() -> None:
    assert first_ids(b"[1, 2,3 ]") == [1, 2, 3]
    long = b"[%b1]" % (b"4294967295, " * (4 << 20))
    assert set(first_ids(long)) == {4294967295}
    assert 170_000 < len(first_ids(long)) < 180_000
    for other in (
        b"[1, -1]",
        b"[4294967296]",
        b"[1.5]",
        b'[1, "2"]',
        b"[1, [2]]",
        b'[1, "%b"]' % (b"," * (4 << 20)),
        b"[1",
    ):
        with pytest.raises(ValueError):  # noqa: PT011  whatever the decoder says
            first_ids(other)


def test_nobody_is_asked_for_what_cannot_be_said_in_time() -> None:
    assert asked("/v1/completions", prompt="a " * (1 << 20)) is None
    assert asked(CHAT, messages=[{"role": "user", "content": "a " * (1 << 20)}]) is None
    assert asked("/v1/completions", prompt="a " * (1 << 19)) is not None
