"""What the bodies for prefill and decode have for the hand-off between them; see :mod:`ems.engines.handoff`.

What always holds: without anything from a prefill the decode instance gets the client's very bytes; with it, only the
fields of the hand-off differ.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw

from ems.engines.handoff import KV_TRANSFER_PARAMS, Bootstrap, HandoffKind, body_with, clients_fields, prefill_fields
from ems.router.request import CompletionRequest

_encode = msgspec.json.Encoder().encode


def of_client(request: CompletionRequest) -> CompletionRequest:
    """Return a client's request without what only the router may say of a hand-off."""
    fields = clients_fields(request.fields)
    return request if fields is request.fields else CompletionRequest.of(fields)


def prefill_body(request: CompletionRequest, kind: HandoffKind, bootstrap: Bootstrap | None = None) -> bytes:
    """Return the body that makes an instance compute the prompt's KV and one token, and let decode have the KV."""
    return _encode(prefill_fields(request.fields, kind, bootstrap, single=request.single))


def decode_body(request: CompletionRequest, params: Raw | None, bootstrap: Bootstrap | None = None) -> bytes:
    """Return the client's body with what decode needs to find the prefill's KV, if there is anything."""
    if bootstrap is not None:
        return body_with(request.body, request.fields, bootstrap.fields())
    if params is None or not request.single:
        return request.body
    return body_with(request.body, request.fields, {KV_TRANSFER_PARAMS: params})
