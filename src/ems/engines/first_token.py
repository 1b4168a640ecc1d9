"""A client's request, cut down to the computing of its prompt and one token.

What always holds: every field that changes the prompt, and so its KV, stays; what only shapes an answer goes, since it
costs time, makes the engine refuse (a ``min_tokens`` above one), or computes many tokens (``n``).
"""

from __future__ import annotations

from typing import Final

from msgspec import Raw

_ONE: Final = Raw(b"1")
_FALSE: Final = Raw(b"false")

SHAPES_ANSWERS: Final = frozenset(
    (
        *("n", "best_of", "use_beam_search", "length_penalty", "min_tokens", "stream_options"),
        *("logprobs", "top_logprobs", "prompt_logprobs", "echo", "return_token_ids"),
        *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"),
        *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        *("background", "store"),
    )
)
"""Fields that mean nothing for one token that nobody reads.  ``tools`` and ``tool_choice`` are part of the prompt."""


def first_token_fields(fields: dict[str, Raw]) -> dict[str, Raw]:
    """Return the fields of the request for prefill, bounded in the way of the endpoint that they are for."""
    kept = {name: value for name, value in fields.items() if name not in SHAPES_ANSWERS}
    of_response = "input" in fields
    if of_response:
        kept["max_output_tokens"] = _ONE
        kept["store"] = _FALSE
    if not of_response or "messages" in fields or "prompt" in fields:
        kept["max_tokens"] = _ONE
        if "max_completion_tokens" in fields:
            kept["max_completion_tokens"] = _ONE
    kept["stream"] = _FALSE
    return kept
