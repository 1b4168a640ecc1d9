"""A small tokenizer for made-up models: any text survives it, and what the model says can be read aloud.

The vocabulary is the 256 bytes, three special tokens, and syllables and two-syllable words that are pairs of pairs of
letters.  It has no padding: the model's vocabulary is exactly as large.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import msgspec
import numpy as np

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
FIRST_READABLE = 256 + len(SPECIAL_TOKENS)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_CONSONANTS = "bfhjklmnprstvw"
_VOWELS = "aeiou"
_SPACE = "Ġ"  # how byte-level vocabularies write a leading space


def write_tokenizer(directory: Path, vocab_size: int, seed: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``; ``vocab_size`` is at least 399."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    merges = _merges(vocab_size - FIRST_READABLE, seed)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *SPECIAL_TOKENS, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(BPE(vocab={word: index for index, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [TURN_START],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config)))


def _merges(count: int, seed: int) -> list[tuple[str, str]]:
    """Return ``count`` merges: all syllables, all of them after a space, then random words of two."""
    syllables = list(product(_CONSONANTS, _VOWELS))
    merges = [*syllables, *((_SPACE, c + v) for c, v in syllables)]
    if count < len(merges):
        least = FIRST_READABLE + len(merges)
        raise ValueError(f"a vocabulary of {FIRST_READABLE + count} tokens is too small, expected {least} or more")
    words = np.random.default_rng(seed).choice(len(syllables) ** 2, count - len(merges), replace=False)
    for word in words:
        first, second = divmod(int(word), len(syllables))
        merges.append((_SPACE + "".join(syllables[first]), "".join(syllables[second])))
    return merges
