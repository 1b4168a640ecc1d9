"""Pages that say the same whichever worker serves them: it asks the others.

What always holds: a worker that does not answer in time is left out of what is shown, and named where it was to change.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any
from urllib.parse import unquote

import msgspec

from ems.http.message import Refusal, Request
from ems.http.reply import Reply
from ems.router.metrics import CONTENT_TYPE
from ems.router.observe.decisions import LISTED, Decisions
from ems.router.pages import Pages, no_request, read_change
from ems.router.workers.link import Link
from ems.router.workers.totals import summed

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class SharedPages:
    """``by_path`` has them; ``metrics`` is this worker's own page."""

    def __init__(self, link: Link, pages: Pages, decisions: Decisions, metrics: Callable[[], bytes]) -> None:
        self._link = link
        self._pages = pages
        link.change = pages.change
        link.answers = {
            "metrics": lambda _: metrics(),
            "decision": lambda request_id: _encode(decisions.find(request_id)),
            "decisions": lambda _: _encode(decisions.newest()),
        }
        self.by_path: dict[str, Callable[[Request, Reply], Awaitable[None]]] = {
            "/metrics": self._metrics,
            "/debug/requests": self._decisions,
            "/debug/requests/": self._decision,
            "/instances/add": partial(self._change, listed=True),
            "/instances/remove": partial(self._change, listed=False),
        }

    async def _all(self, what: str, argument: str = "") -> list[bytes]:
        return [self._link.answers[what](argument), *await self._link.ask(what, argument)]

    async def _metrics(self, _: Request, reply: Reply) -> None:
        reply.whole(200, summed(await self._all("metrics")), kind=CONTENT_TYPE)

    async def _decision(self, request: Request, reply: Reply) -> None:
        answers = map(_decode, await self._all("decision", unquote(request.path.rpartition("/")[2])))
        found = next(filter(None, answers), None)
        if found is None:
            raise no_request()
        reply.json(200, found)

    async def _decisions(self, _: Request, reply: Reply) -> None:
        ended: list[Any] = [one for answer in await self._all("decisions") for one in _decode(answer)]
        ended.sort(key=lambda one: -one[0])
        reply.json(200, {"requests": [one for _, one in ended[:LISTED]]})

    async def _change(self, request: Request, reply: Reply, *, listed: bool) -> None:
        role, addresses = read_change(request.body) if listed else self._pages.removal(request)
        message, late = await self._link.change_all(role, addresses, listed=listed)
        if not message:
            raise Refusal(503, "The workers did not take the change in time; try again", code="workers_busy")
        self._pages.changed(message, reply, **({"pending_workers": late} if late else {}))
