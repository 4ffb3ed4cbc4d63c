"""The search for messages that fail: pure, against a reader that fails at known offsets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outbox.consumer.model import Range
from spark_jobs.driver.poison_search import SAME, PoisonSearch

ENDS = {("t", 0): 25_000, ("t", 1): 3_000, ("u", 0): 1}


class Reader:
    """Applies what it is given, but for ranges with a bad offset; then nobody gets on, as when a stage is aborted."""

    def __init__(self, bad: set[tuple[tuple[str, int], int]], *, certain: bool = False, most: int = 10_000) -> None:
        self.bad = bad
        self.certain = certain
        self.most = most
        self.search = PoisonSearch()
        self.position = dict.fromkeys(ENDS, 0)
        self.attempts = 0
        self.narrowed = False

    def planned(self) -> dict[tuple[str, int], Range]:
        return {
            partition: Range("id", here, min(ENDS[partition], here + self.most))
            for partition, here in self.position.items()
            if here < ENDS[partition]
        }

    def step(self, error: str = "an error") -> tuple[tuple[str, int], int] | None:
        """Do a round; return what the search has found."""
        ranges = self.search.narrowed(self.planned())
        self.attempts += 1
        failing = [
            partition
            for partition, span in ranges.items()
            if any((partition, offset) in self.bad for offset in range(span.start, span.end))
        ]
        if failing:
            blamed = {partition: ranges[partition] for partition in (failing if self.certain else ranges)}
            self.narrowed = self.search.failed(blamed, error, certain=self.certain or len(ranges) == 1)
        for partition, span in ranges.items():
            if partition not in failing and (self.certain or not failing):
                self.position[partition] = span.end
                self.search.passed({partition: span})
        found = {partition: self.search.found(partition) for partition in ENDS}
        return next(((partition, offset) for partition, offset in found.items() if offset is not None), None)

    def until_found(self) -> tuple[tuple[str, int], int]:
        for _ in range(500):
            if (found := self.step()) is not None:
                return found
        raise AssertionError("nothing was found")


def test_one_message_of_25_000_is_found_and_all_others_are_applied():
    reader = Reader({(("t", 0), 15_000)})
    assert reader.until_found() == (("t", 0), 15_000)
    assert reader.position == ENDS | {("t", 0): 15_000}
    # 14 halvings of 10,000, what the others need, and the certainty before and after.
    assert reader.attempts < 40


def test_a_partition_whose_failure_is_known_keeps_nobody_waiting():
    reader = Reader({(("t", 0), 0)}, certain=True)
    reader.step()
    assert reader.position == ENDS | {("t", 0): 0}


def test_fewer_failures_than_same_change_nothing():
    reader = Reader({(("t", 0), 5)})
    for _ in range(SAME - 1):
        reader.step()
    assert reader.search.narrowed(reader.planned()) == reader.planned()


def test_different_errors_are_not_the_same_failure():
    reader = Reader({(("t", 0), 5)})
    for n in range(5 * SAME):
        reader.step(f"error {n}")
    assert reader.search.narrowed(reader.planned()) == reader.planned()


def test_an_outage_that_is_over_leaves_nothing_behind():
    reader = Reader({(("t", 0), offset) for offset in range(25_000)})
    for _ in range(SAME + 8):
        reader.step()
    reader.bad.clear()
    while reader.position != ENDS:
        assert reader.step() is None
    # Those that were read in small parts meanwhile are read in full again.
    assert reader.attempts < SAME + 8 + 30


def test_who_is_set_back_begins_anew():
    reader = Reader({(("t", 0), 15_000)})
    reader.until_found()
    reader.bad.clear()
    reader.position["t", 0] = 0
    assert reader.search.narrowed(reader.planned())["t", 0] == Range("id", 0, 10_000)


@given(
    st.sets(st.sampled_from([(partition, offset) for partition, end in ENDS.items() for offset in range(0, end, 97)])),
    st.integers(1, 30_000),
    st.booleans(),
)
def test_whatever_is_bad_the_first_of_a_partition_is_found(bad, most, certain):
    reader = Reader(bad, certain=certain, most=most)
    if not bad:
        return
    while (found := reader.step()) is None:
        assert reader.attempts < 200_000
    partition, offset = found
    assert offset == min(other for where, other in bad if where == partition)
    assert reader.position[partition] == offset


def test_each_failure_that_makes_less_of_it_says_so_and_they_come_to_an_end():
    reader = Reader({(("t", 0), offset) for offset in range(25_000)}, certain=True)
    said = []
    for _ in range(60):
        reader.step()
        said.append(reader.narrowed)
    # The third failure of 10,000, then one for each half down to two.
    assert sum(said) == 13
    assert not any(said[20:])


def test_a_message_must_fail_for_a_while():
    now = 100.0
    search = PoisonSearch(30.0, lambda: now)
    span = {("t", 0): Range("id", 7, 8)}
    for _ in range(10):
        search.narrowed(span)
        search.failed(span, "lost", certain=True)
        assert search.found(("t", 0)) is None
        now += 3
    search.failed(span, "lost", certain=True)
    assert search.found(("t", 0)) == 7
    # Another error is another matter, and its time begins anew.
    search.failed(span, "something else", certain=True)
    assert search.found(("t", 0)) is None


def test_what_has_passed_is_forgotten_also_where_nothing_follows():
    search = PoisonSearch()
    whole = {("t", 0): Range("id", 0, 100)}
    for _ in range(SAME):
        search.failed(search.narrowed(whole), "an error", certain=True)
    assert search.narrowed(whole) == {("t", 0): Range("id", 0, 50)}
    search.passed({("t", 0): Range("id", 0, 50)})
    assert search.narrowed({("t", 0): Range("id", 50, 100)}) == {("t", 0): Range("id", 50, 75)}
    search.passed({("t", 0): Range("id", 50, 100)})
    assert search.narrowed({("t", 0): Range("id", 0, 100)}) == whole
