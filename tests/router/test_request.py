"""What a request weighs, by its body alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ems.router.choosing.prefix_index import MOST_PIECES, PIECE_TOKENS
from ems.router.request import DEFAULT_OUTPUT, IMAGE_TOKENS, OUTPUT_CAP, REQUEST_OVERHEAD, parse


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, 0),
        ({"prompt": "x" * 398}, 100),
        ({"prompt": list(range(100))}, 100),
        ({"prompt": [[1, 2, 3], [4, 5]]}, 5),
        ({"prompt": ["x" * 194, "y" * 194]}, 99),
        ({"messages": [{"role": "user", "content": "x" * 1000}]}, 258),
        ({"prompt": None}, 1),
        ({"prompt": 7}, 0),
        ({"messages": "x", "prompt": "x" * 398}, 100),
        ({"prompt": "", "input": "x" * 398}, 100),
        ({"prompt": "x" * 398, "tools": ["x" * 396]}, 200),
        ({"prompt": ";base64," + "x" * 390}, 100),
        ({"messages": [{"content": 'url": "data:image/png;base64,' + "x" * 355}]}, 100),
    ],
)
def test_the_prompts_tokens_are_estimated_from_its_size(fields: dict[str, Any], tokens: int) -> None:
    assert tokens == parse(json.dumps(fields).encode()).prompt_tokens


def test_inlined_media_count_by_piece_not_by_size() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBOR" * 100_000}}
    request = parse(json.dumps({"messages": [{"role": "user", "content": [image, image]}]}).encode())

    assert 2 * IMAGE_TOKENS < request.prompt_tokens < 2 * IMAGE_TOKENS + 200


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, DEFAULT_OUTPUT),
        ({"max_tokens": 10}, 10),
        ({"max_tokens": 10, "max_completion_tokens": 20}, 20),
        ({"max_tokens": 10**9}, OUTPUT_CAP),
        ({"max_tokens": 10**40}, OUTPUT_CAP),
        ({"max_tokens": -5}, 0),
        ({"max_tokens": None}, DEFAULT_OUTPUT),
        ({"max_tokens": "many"}, DEFAULT_OUTPUT),
    ],
)
def test_the_answers_tokens_are_bounded(fields: dict[str, Any], tokens: int) -> None:
    request = parse(json.dumps(fields).encode())

    assert tokens == request.output_tokens
    assert tokens + REQUEST_OVERHEAD == request.decode_cost


def test_a_long_prompt_of_token_ids_is_looked_at_as_far_as_one_of_text() -> None:
    ids = [7] * (PIECE_TOKENS * (MOST_PIECES + 9))
    request = parse(json.dumps({"prompt": ids}).encode())

    assert len(request.prompt(block_tokens=PIECE_TOKENS).hashes) == MOST_PIECES
    assert request.prompt_tokens == len(ids)
