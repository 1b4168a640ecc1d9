from __future__ import annotations

from ems.http.address import Address
from ems.router.choosing.tokenizers import REST, Tokenizers
from ems.router.fleet import Fleet, Role


def fleet(instances: int) -> Fleet:
    made = Fleet()
    for port in range(1, instances + 1):
        made.add(Role.DECODE, Address("h", port), 0.0, trusted=True)
    return made


def test_who_has_least_to_do_is_asked() -> None:
    made, tokenizers = fleet(3), Tokenizers()
    usable = one, two, three = made.usable(Role.DECODE)
    made.hold(one, 1)

    assert tokenizers.begin(usable, 1, 0.0) is two
    assert tokenizers.begin(usable, 1, 0.0) is three
    assert tokenizers.begin(usable, 1, 0.0) is one
    tokenizers.end(three, 1, 0.0, rests=False)
    assert tokenizers.begin(usable, 1, 0.0) is three


def test_who_fails_is_asked_again_after_a_rest() -> None:
    made, tokenizers = fleet(2), Tokenizers()
    usable = one, _two = made.usable(Role.DECODE)

    for failing in usable:
        assert tokenizers.begin(usable, 1, 5.0) is failing
        tokenizers.end(failing, 1, 5.0, rests=True)
    assert tokenizers.begin(usable, 1, 5.0) is None
    assert tokenizers.begin([], 1, 5.0) is None
    assert tokenizers.begin(usable, 1, 5.0 + REST) is one
    assert not one.breaker.doubted, "it may do well for requests"


def test_who_failed_a_request_is_asked_last() -> None:
    made, tokenizers = fleet(2), Tokenizers()
    usable = one, two = made.usable(Role.DECODE)
    made.suspect(one, 0.0)

    assert tokenizers.begin(usable, 1, 0.0) is two
    assert tokenizers.begin(usable, 1, 0.0) is two
    assert tokenizers.begin([one], 1, 0.0) is one


def test_nobody_is_remembered_for_ever() -> None:
    tokenizers = Tokenizers()
    for number in range(9):
        (one,) = fleet(1).usable(Role.DECODE)
        assert tokenizers.begin([one], 1, number * 2 * REST) is one
        tokenizers.end(one, 1, number * 2 * REST, rests=True)

    assert (len(tokenizers._asking), len(tokenizers._rests)) == (0, 1)
