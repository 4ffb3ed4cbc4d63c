"""Which failures a reader knows, and what it says of a row that it has read."""

from __future__ import annotations

from hashlib import sha256

from relay.core.ports import Claim
from relay.polling.blocked_keys import FailureRow, KnownFailures


def failed(id_: int, key: str = "a", kind: str = "Order", *, blocks: bool = True) -> FailureRow:
    return FailureRow(id_, kind, sha256(key.encode()).digest()[:16], blocks)


def row(id_: int, key: str = "a", kind: str = "Order", *, copy: bool = False) -> Claim:
    headers = {"outbox-dead-letter": "why"} if copy else None
    return Claim(id_, "e", kind, key, "T", "", None, headers)


def test_a_row_waits_for_the_failures_of_its_key_below_it():
    keys = KnownFailures()
    assert not keys
    assert keys.replace([failed(5), failed(9), failed(7, "b"), failed(8, blocks=False)]) is None
    assert keys
    assert keys.before(row(10)) == {5, 9}
    assert keys.before(row(6)) == {5}
    assert keys.before(row(5)) == keys.before(row(3)) == set()
    assert keys.before(row(10, "c")) == keys.before(row(10, kind="Cart")) == keys.before(row(10, copy=True)) == set()


def test_what_is_gone_is_said_once_the_lowest_first_and_only_if_it_blocked():
    keys = KnownFailures()
    keys.replace([failed(n) for n in (5, 6, 7)] + [failed(2, blocks=False)])
    assert keys.matches(4, 20)
    assert keys.replace([failed(5), failed(6), failed(7)]) is None
    assert keys.replace([failed(5), failed(8)]) == 6
    assert keys.matches(2, 13)
    # Of two ids that are asked about, one is there, and is new.
    assert keys.replace([failed(9)], asked=[8, 9, 10]) == 8
    assert keys.before(row(11)) == {5, 9}
    assert keys.remove([5, 5, 77]) == 5
    assert keys.remove([9]) == 9
    assert not keys
    assert keys.matches(0, 0)
    assert keys.before(row(11)) == set()


def test_the_failures_up_to_an_id_and_whether_they_block():
    keys = KnownFailures()
    keys.replace([failed(9), failed(5), failed(8, blocks=False)])
    assert [keys.up_to(id_) for id_ in (4, 5, 8, 9)] == [[], [5], [5, -8], [5, -8, 9]]
