from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ems.http.bearer import Tokens
from ems.http.message import Refusal
from ems.kthena.rate_limit import RateLimit, Unit
from ems.router.admission.gate import Asked, Gate, Ticket
from ems.router.admission.keys import ANYBODY, ApiKey, KeyFile, Keys, Principal
from ems.router.admission.limits import Kind
from ems.router.admission.settings import AdmissionConfig
from tests.http.test_bearer import OTHER, checker, key_set, signed
from tests.router.admission.api_keys import digest_of, new_key
from tests.router.fakes import until

MINUTE = RateLimit(input_tokens_per_unit=100, output_tokens_per_unit=100, unit=Unit.MINUTE)


def gate(**settings: Any) -> Gate:
    return Gate(AdmissionConfig(**settings))


async def refused(work: Any, status: int) -> Refusal:
    with pytest.raises(Refusal) as refusal:
        await work
    assert refusal.value.status == status
    return refusal.value


async def waiting(here: Gate, user: str = "", **asked: Any) -> asyncio.Task[Ticket]:
    """A request that waits for its place."""
    before = here.queue.waiting
    task = asyncio.create_task(here.enter(Principal(user), Asked(**asked)))
    await until(lambda: here.queue.waiting > before)
    return task


def empty(here: Gate) -> bool:
    return (here.queue.running, here.queue.waiting, here._waiting) == (0, 0, {})


async def test_without_settings_everybody_passes() -> None:
    here = gate()
    assert await here.identify([(b"authorization", b"Bearer x")]) == ANYBODY
    (await here.enter(ANYBODY, Asked("m", 10**9))).done(10**9)


@pytest.mark.parametrize(
    "header",
    [(b"authorization", b"Bearer %s"), (b"authorization", b"bearer  %s "), (b"x-api-key", b"%s"), (b"api-key", b"%s")],
)
async def test_a_key_is_sent_in_any_usual_way(header: tuple[bytes, bytes]) -> None:
    key = new_key()
    here = Gate(AdmissionConfig(), keys=Keys(KeyFile(keys=(ApiKey(id="a", sha256=digest_of(key)),))))

    assert (await here.identify([(b"host", b"x"), (header[0], header[1] % key.encode())])).user == "a"
    assert (await refused(here.identify([(header[0], header[1] % b"no")]), 401)).headers == {
        "www-authenticate": "Bearer"
    }
    assert (await refused(here.identify([]), 401)).code == "missing_credentials"


async def test_tokens_and_keys_go_together_and_a_new_key_is_asked_for_once() -> None:
    class Source:
        def __init__(self, tokens: Tokens[Principal]) -> None:
            self.tokens = tokens
            self.asked = 0

        async def renew(self) -> bool:
            self.asked += 1
            self.tokens.use(key_set(OTHER))
            return self.asked == 1

    tokens = checker()
    source = Source(tokens)
    key = new_key()
    keys = Keys(KeyFile(keys=(ApiKey(id="a", sha256=digest_of(key)),)))
    here = Gate(AdmissionConfig(), keys=keys, tokens=tokens, renew_keys=source.renew)
    ends = 4 * 10**9

    assert (await here.identify([(b"x-api-key", key.encode())])).user == "a"
    assert (await here.identify([(b"authorization", b"Bearer " + signed(OTHER, exp=ends))])).user == "alice"
    assert source.asked == 1
    assert (
        await refused(here.identify([(b"authorization", b"Bearer " + signed(exp=ends))]), 401)
    ).code == "invalid_token"


async def test_a_model_that_is_not_for_the_key_is_refused() -> None:
    assert (await refused(gate().enter(Principal("u", ("a",)), Asked("b")), 403)).param == "model"


async def test_limits_say_when_to_come_again_and_failures_cost_nothing() -> None:
    here = gate()
    asked = Asked("m", 80, limited=(("route/m", MINUTE),))
    first = await here.enter(ANYBODY, asked)
    assert (await refused(here.enter(ANYBODY, asked), 429)).headers == {"retry-after": "36"}
    first.failed()
    first.done(1000)
    (await here.enter(ANYBODY, asked)).done(200)

    assert (await refused(here.enter(ANYBODY, Asked("m", 1, limited=asked.limited)), 429)).message.startswith("output")


async def test_limits_of_router_route_and_key_hold_together() -> None:
    here = gate(limit=RateLimit(input_tokens_per_unit=50))
    someone = Principal("u", scope="key/u", limit=RateLimit(input_tokens_per_unit=20))

    await refused(here.enter(ANYBODY, Asked("m", 51)), 429)
    await refused(here.enter(someone, Asked("m", 21)), 429)
    (await here.enter(someone, Asked("m", 20))).failed()


async def test_waits_for_a_place_and_is_given_one() -> None:
    here = gate(max_running=1)
    first = await here.enter(ANYBODY, Asked())
    second = await waiting(here)
    first.failed()
    ticket = await second
    ticket.done(1)

    assert ticket.queued > 0
    assert empty(here)


async def test_a_client_that_leaves_while_it_waits_leaves_nothing_behind() -> None:
    here = gate(max_running=1)
    limited = (("route/m", MINUTE),)
    first = await here.enter(ANYBODY, Asked(limited=limited))
    second = await waiting(here, input_tokens=50, limited=limited)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    first.done(0)

    assert empty(here)
    assert here.limits.left(0.0)["route/m", Kind.INPUT] == 100


async def test_a_client_that_leaves_as_it_is_given_a_place_gives_it_back() -> None:
    here = gate(max_running=1)
    first = await here.enter(ANYBODY, Asked())
    second, third = await waiting(here), await waiting(here)
    first.done(0)  # the place is the second's now
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    (await third).done(0)

    assert empty(here)


async def test_who_is_cancelled_before_its_place_comes_does_not_keep_it() -> None:
    here = gate(max_running=1)
    first = await here.enter(ANYBODY, Asked())
    second, third = await waiting(here), await waiting(here)
    second.cancel()
    first.done(0)  # the second has not run since
    with pytest.raises(asyncio.CancelledError):
        await second
    (await third).done(0)

    assert empty(here)


async def test_a_wait_that_is_too_long_is_503_with_a_time_to_come_again() -> None:
    here = gate(max_running=1, queue_timeout=0.01)
    first = await here.enter(ANYBODY, Asked())
    refusal = await refused(here.enter(ANYBODY, Asked()), 503)
    first.done(0)

    assert (refusal.code, refusal.headers) == ("overloaded", {"retry-after": "1"})
    assert empty(here)


async def test_a_full_queue_is_503_and_429_for_who_fills_it() -> None:
    here = gate(max_running=1, queue_size=2)
    first = await here.enter(Principal("greedy"), Asked())
    second, third = await waiting(here, "greedy"), await waiting(here, "greedy")
    assert (await refused(here.enter(Principal("greedy"), Asked()), 429)).headers == {"retry-after": "1"}
    other = asyncio.create_task(here.enter(Principal("other"), Asked()))
    assert (await refused(third, 429)).code == "too_many_waiting"
    await refused(here.enter(Principal("third"), Asked()), 503)
    first.done(1)
    (await other).done(1)
    (await second).done(1)

    assert empty(here)


async def test_pages_of_administrators() -> None:
    await gate().administrator([], "127.0.0.1")
    await gate().administrator([], "::1")
    await refused(gate().administrator([], "10.0.0.1"), 403)
    boss, user = new_key(), new_key()
    keys = (ApiKey(id="a", sha256=digest_of(boss), administers=True), ApiKey(id="b", sha256=digest_of(user)))
    here = Gate(AdmissionConfig(), keys=Keys(KeyFile(keys=keys)))
    await here.administrator([(b"x-api-key", boss.encode())], "10.0.0.1")
    await refused(here.administrator([(b"x-api-key", user.encode())], "127.0.0.1"), 403)
    await refused(here.administrator([], "127.0.0.1"), 401)
