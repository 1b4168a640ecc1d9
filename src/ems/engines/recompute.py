"""An answer that an engine gave up in the middle, to be computed anew elsewhere: vLLM-Ascend's ``recomputed``.

A decode instance that runs out of memory ends a request with ``"stop_reason": "recomputed"``.  The client must not see
that: what was generated so far becomes part of the prompt, and what another instance goes on with is put behind it.

Events are passed on as they come.  Only of an event that is not complete yet nothing is passed on, since its end may
turn out to be the signal; no reader of events can use a part of one.

What always holds: each token that an engine generated reaches the client once; the signal never does.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Raw

MOST_LEGS: Final = 8
"""Engines that may work on one answer, each of which but the last gives it up."""
_MARK: Final = b"recomputed"
_ENDS: Final = (b"\n\n", b"\r\n\r\n", b"\r\r")
_READ_AT: Final = 32  # pieces; fewer are kept as they came, since most answers end without having been read
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class _Part(msgspec.Struct, frozen=True):
    content: str | None = None
    tool_calls: Any = None
    function_call: Any = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None

    @property
    def is_more(self) -> bool:
        """Whether something besides text is in it."""
        return bool(self.tool_calls or self.function_call or self.reasoning or self.reasoning_content or self.refusal)


class _Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    delta: _Part | None = None
    message: _Part | None = None
    stop_reason: Any = None


class _Event(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...] = ()
    id: str | None = None


class CannotContinue(ValueError):
    """What was generated so far cannot be put into a prompt."""


_NOTHING: Final = _Choice()
_read_event = msgspec.json.Decoder(_Event).decode


class Generated:
    """What of one answer the client has, over all engines that worked on it."""

    def __init__(self, *, chat: bool) -> None:
        self._chat = chat
        self._pieces: list[bytes] = []
        self._texts: list[str] = []
        self._tail = b""
        self._plain = True
        """Whether nothing but text was generated."""
        self._id = ""
        self.tokens = 0
        """How many were generated, counted as one for each event that brings text."""
        self._before = 0
        """How many of them by earlier engines."""
        self.broken_off = False
        """Whether the engine that answers now has given up."""
        self.legs = 1

    def begin(self) -> None:
        """Another engine answers; of one before it that broke off nothing is left but what was passed on."""
        self.broken_off = False
        self._tail = b""

    # ---------------------------------------------------------------------------------------------------------- streams

    def feed(self, data: bytes) -> bytes:
        """Take a piece of an event stream; return what of it is for the client."""
        if self._tail:
            data = self._tail + data
            self._tail = b""
        if not data.endswith(_ENDS):
            cut = max(data.rfind(end) + len(end) if end in data else 0 for end in _ENDS)
            data, self._tail = data[:cut], data[cut:]
        if self.broken_off:
            return b""
        if _MARK in data or self.legs > 1:
            return self._closely(data)
        self._pieces.append(data)
        if len(self._pieces) >= _READ_AT:
            self._read()
        return data

    @property
    def held(self) -> int:
        """Bytes of an event whose end has not come."""
        return len(self._tail)

    def rest(self) -> bytes:
        """What is left when the stream ends amid an event."""
        rest, self._tail = self._tail, b""
        return b"" if self.broken_off else rest

    def _closely(self, data: bytes) -> bytes:
        self._read()
        passed = []
        for event in data.split(b"\n\n"):
            choice = self._note(event)
            if choice is not None and choice.stop_reason == "recomputed":
                self.broken_off = True
                if _text_of(choice):
                    value = _decode(event.removeprefix(b"data: "))
                    value["choices"][0].update(stop_reason=None, finish_reason=None)
                    passed.append(b"data: " + _encode(value))
                passed.append(b"")
                break
            joins = choice is not None and self.legs > 1
            passed.append(b"data: " + self._joined(_decode(event.removeprefix(b"data: "))) if joins else event)
        return b"\n\n".join(passed)

    def _joined(self, value: dict[str, Any]) -> bytes:
        """An event of a later engine as if the first one had sent it."""
        value["id"] = self._id or value.get("id")
        if isinstance(value.get("usage"), dict):
            _correct(value["usage"], self._before)
        return bytes(_encode(value))

    def _read(self) -> None:
        """Keep the text of the pieces alone; of many answers at once the events would be much to keep."""
        pieces, self._pieces = self._pieces, []
        for event in b"".join(pieces).split(b"\n\n"):
            self._note(event)

    def _note(self, event: bytes) -> _Choice | None:
        """Take in what an event brings; None where that is nothing."""
        if not event.startswith(b"data: {"):
            return None
        try:
            value = _read_event(event.removeprefix(b"data: "))
        except msgspec.DecodeError:  # whatever it is, it cannot be put into a prompt
            self._plain = False
            return None
        self._id = self._id or value.id or ""
        return self._choice(value)

    def _choice(self, value: _Event) -> _Choice:
        choice = value.choices[0] if value.choices else _NOTHING
        if text := _text_of(choice):
            self._texts.append(text)
            self.tokens += 1
        part = choice.delta or choice.message
        if part is not None and part.is_more:
            self._plain = False
        return choice

    # ---------------------------------------------------------------------------------------------------- whole answers

    def whole(self, body: bytes) -> bytes:
        """Take a whole answer; return it as the client gets it, nothing when its engine has given up."""
        if _MARK not in body and self.legs == 1:
            return body
        before = "".join(self._texts)
        said = self._choice(_read_event(body))
        if said is _NOTHING:
            return body
        value = _decode(body)
        usage = value.get("usage") or {}
        self.tokens = self._before + int(usage.get("completion_tokens", 0))
        if said.stop_reason == "recomputed":
            self.broken_off = True
            return b""
        choice = value["choices"][0]
        if self._chat:
            choice["message"]["content"] = before + (choice["message"].get("content") or "")
        else:
            choice["text"] = before + choice.get("text", "")
        _correct(usage, self._before)
        return bytes(_encode(value))

    # -------------------------------------------------------------------------------------------------------- going on

    def next_fields(self, fields: dict[str, Raw]) -> dict[str, Raw]:
        """Return the fields of the request that goes on, made of those of the client's.

        :raises CannotContinue: more than text was generated, or the prompt is not text.
        """
        text = "".join(self._texts)
        fields = dict(fields)
        if not self._plain:
            raise CannotContinue("more than text was generated")
        if self.legs >= MOST_LEGS:
            raise CannotContinue(f"{self.legs} instances gave it up")
        try:
            if self._chat:
                messages = msgspec.json.decode(fields["messages"], type=list[Raw])
                said = Raw(_encode({"role": "assistant", "content": text}))
                fields["messages"] = Raw(_encode([*messages, said]))
                fields["continue_final_message"] = Raw(b"true")
                fields["add_generation_prompt"] = Raw(b"false")
            else:
                fields["prompt"] = Raw(_encode(msgspec.json.decode(fields["prompt"], type=str) + text))
            for name in ("max_tokens", "max_completion_tokens"):
                if name in fields:
                    fields[name] = Raw(_encode(max(1, msgspec.json.decode(fields[name], type=int) - self.tokens)))
            if "min_tokens" in fields:
                fields["min_tokens"] = Raw(_encode(max(0, msgspec.json.decode(fields["min_tokens"]) - self.tokens)))
        except (KeyError, msgspec.DecodeError) as error:
            raise CannotContinue(str(error)) from error
        self.legs += 1
        self.begin()
        self._before = self.tokens
        return fields


def _text_of(choice: _Choice) -> str:
    part = choice.delta or choice.message
    return choice.text or (part.content if part is not None else None) or ""


def _correct(usage: dict[str, Any], before: int) -> None:
    """Count what earlier engines generated as generated, not as prompt."""
    if isinstance(usage.get("prompt_tokens"), int) and isinstance(usage.get("completion_tokens"), int):
        usage["prompt_tokens"] -= before
        usage["completion_tokens"] += before
