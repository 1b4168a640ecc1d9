"""First turns of conversations that end in every way that an answer can end."""

from __future__ import annotations

import http.client
import json
from typing import Any

from tests.e2e.engines import ANSWER_SECONDS, Prompt, post
from tests.kit.engine import VllmServer

ENDS = ("length", "stop token", "stop string", "hang up")
TOKENS = 100
"""Of an answer that ends by its length; the others end before, after more than half of it."""
LEFT = 60
"""Tokens that a client has read when it hangs up."""


def first_turn(server: VllmServer, prompt: Prompt, end: str) -> Prompt:
    """All tokens that the client knows after an answer to ``prompt`` that ended in the way ``end``."""
    # What follows is chosen from an answer that shares nothing with the one that is asked for below.
    known = _ask(server, prompt, cache_salt="beforehand")
    if end == "hang up":
        return prompt + _leave(server, prompt)
    limits: dict[str, Any] = {}
    if end == "stop token":
        tokens = known["token_ids"]
        limits["stop_token_ids"] = [next(t for at, t in enumerate(tokens) if at > LEFT and t not in tokens[:at])]
    elif end == "stop string":
        text = known["text"]
        limits["stop"] = next(
            text[at : at + 6] for at in range(2 * len(text) // 3, len(text)) if text.find(text[at : at + 6]) == at
        )
    answer = _ask(server, prompt, **limits)
    assert answer["finish_reason"] == ("length" if end == "length" else "stop")
    assert LEFT // 2 < len(answer["token_ids"]) <= TOKENS
    return prompt + list(answer["token_ids"])


def _body(prompt: Prompt, **more: object) -> dict[str, Any]:
    greedy = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"model": "tiny", "prompt": prompt, **greedy, **more}


def _ask(server: VllmServer, prompt: Prompt, **more: object) -> dict[str, Any]:
    return dict(post(server.url, "/v1/completions", _body(prompt, **more))["choices"][0])


def _leave(server: VllmServer, prompt: Prompt) -> Prompt:
    """Hang up in the middle of a long answer; the tokens that had come."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=ANSWER_SECONDS)
    body = _body(prompt, stream=True, max_tokens=10 * TOKENS)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer, came = connection.getresponse(), list[int]()
    while len(came) < LEFT:
        line = answer.readline()
        if line.startswith(b"data: {"):
            came += json.loads(line.removeprefix(b"data: "))["choices"][0]["token_ids"]
    connection.close()
    return came
