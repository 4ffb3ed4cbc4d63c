"""Low-water marks: from which id on a polling source reads, while transactions are open."""

from __future__ import annotations

import re
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from one_lane import OneLane
from polling_support import add, fetched, lanes, settle, source, taken
from support import wait_until

from outbox import Event, Outbox
from relay.polling import low_water_mark
from relay.polling.low_water_mark import LOWEST, LowWaterMarks

__all__ = ["lanes"]


class Marks:
    """Low-water marks with a clock and a horizon that a test sets. A read of all lanes each 1.5 seconds."""

    def __init__(self, *lanes: int) -> None:
        self.lanes = lanes
        self.now = 0.0
        self.marks = LowWaterMarks(lambda: self.now)
        self.xmin, self.xid, self.drawn = 10, 20, 0
        self.read: low_water_mark.Marks

    def start(self, after: float = 1.5) -> dict[int, int]:
        """Begin a read; return above which ids it looks."""
        self.now += after
        self.read = self.marks.advance_and_get(self.lanes, draw_xid=self._draw, xmin=lambda: self.xmin)
        return self.read.by_lane

    def seen(self, *lowest: int | None) -> None:
        """End the read: the lowest id that it found in each lane."""
        for lane, each in zip(self.lanes, lowest, strict=True):
            self.marks.seen(self.read, lane, each)

    def _draw(self) -> int:
        self.drawn += 1
        return self.xid


def test_a_mark_waits_for_every_transaction_that_could_commit_below_it():
    marks = Marks(0)
    low = {0: LOWEST}
    assert marks.start() == low
    marks.marks.may_rise_to(0, 100)
    assert marks.start() == low  # 100 becomes the candidate
    marks.seen(101)
    assert marks.start(6.0) == low  # the wait is over: xid 20 is drawn
    marks.seen(101)
    marks.xmin, marks.xid = 19, 30
    assert marks.start() == low  # transaction 19 still runs
    marks.seen(None)
    assert marks.start() == low
    marks.xmin = 20
    assert marks.start() == low  # they have ended; this read must find nothing up to 100
    marks.seen(57)
    assert marks.start() == low  # it found 57
    marks.seen(101)
    assert marks.start() == {0: 100}
    assert marks.start(61.0) == {0: 100}
    assert marks.start() == {0: 100}
    assert marks.drawn == 1


def test_the_marks_of_many_lanes_rise_with_one_transaction_id_each_by_what_it_read_itself():
    marks = Marks(*range(256))
    for lane in range(256):
        marks.marks.may_rise_to(lane, 1000 + lane)
    marks.start()
    marks.start(6.0)
    marks.xmin = 20
    # Begun before the transactions had ended: proves nothing.
    stale = marks.read
    marks.start()
    for lane in range(256):
        marks.marks.seen(stale, lane, None)
    assert set(marks.start().values()) == {LOWEST}
    marks.seen(*([7, None] * 128))
    above = marks.start()
    assert above == {lane: 1000 + lane if lane % 2 else LOWEST for lane in range(256)}
    assert marks.drawn == 1
    marks.marks.reset(1)
    assert marks.start()[1] == LOWEST
    # What is settled meanwhile is the next round's; lanes that still have low rows do not hold the others up for good.
    marks.marks.may_rise_to(3, 5000)
    marks.start(61.0)
    marks.start()
    marks.seen(*([7] * 256))
    marks.start(6.0)
    marks.start(6.0)
    marks.start()
    marks.seen(*([None] * 256))
    assert marks.start()[3] == 5000


def below(database, source_: OneLane) -> bool:
    """Return whether rows below what was settled last are still found after a few reads."""
    for _ in range(10):
        settle(source_, source_.fetch(10))
    with database.connect(autocommit=True) as admin:
        admin.execute(
            "INSERT INTO outbox.events (id, aggregate_type, aggregate_id, event_type) OVERRIDING SYSTEM VALUE "
            "VALUES (-1, 'Order', 'probe', 'probe')"
        )
        claims = source_.fetch(10)
        admin.execute("DELETE FROM outbox.events WHERE id = -1")
    return "probe" in fetched(claims)


@pytest.fixture
def quick_marks(monkeypatch):
    """The waits between the steps of a mark are left out."""
    monkeypatch.setattr(low_water_mark, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(low_water_mark, "_SETTLE_SECONDS", 0.0)


def test_a_forgotten_writer_holds_the_mark_and_a_reader_does_not(outbox_postgres, lanes, quick_marks):
    """The horizon that marks use, on a real server: a snapshot without transaction id does not hold it."""
    source_ = source(outbox_postgres, taken(lanes))
    add(outbox_postgres, "a")
    with outbox_postgres.connect() as reader, outbox_postgres.connect() as writer:
        writer.execute("SELECT pg_current_xact_id()")
        assert below(outbox_postgres, source_)
        add(outbox_postgres, "b")
        assert below(outbox_postgres, source_)
        reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        reader.execute("SELECT 1").fetchone()
        writer.rollback()
        wait_until(lambda: not below(outbox_postgres, source_), what="the mark to rise")
        assert reader.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
    source_.close()


def test_a_late_commit_under_a_rising_mark_is_found(outbox_postgres, lanes, quick_marks):
    source_ = source(outbox_postgres, taken(lanes))
    with outbox_postgres.connect() as late:
        Outbox().add(late, Event("Order", "late", "T"))
        for number in range(20):
            add(outbox_postgres, str(number))
            claims = source_.fetch(10)
            assert fetched(claims) == [str(number)]
            settle(source_, claims)
        late.commit()
    add(outbox_postgres, "last")
    assert fetched(source_.fetch(10)) == ["late", "last"]
    source_.close()


def test_a_slow_copy_under_the_documented_lock_is_not_passed(outbox_postgres, lanes, quick_marks):
    """COPY keeps rows that bring their event ids until it has many: their ids are drawn, and nothing is written."""
    guide = Path(__file__).parents[4] / "docs" / "guides" / "writing-events.md"
    lock = re.search(r"In SQL the lock is\n\n```sql\n(.*?)```", guide.read_text(), re.DOTALL)
    assert lock is not None
    source_ = source(outbox_postgres, taken(lanes))
    add(outbox_postgres, "before")
    settle(source_, source_.fetch(10))
    with outbox_postgres.connect() as slow, outbox_postgres.connect(autocommit=True) as admin:
        drawn = "SELECT last_value FROM outbox.events_id_seq"
        before = admin.execute(drawn).fetchone()
        slow.execute(lock[1].encode())
        columns = "event_id, aggregate_type, aggregate_id, event_type"
        with slow.cursor().copy(f"COPY outbox.events ({columns}) FROM STDIN") as copy:
            copy.write(f"{uuid4()}\tStock\ttea\tCounted\n")
            slow.pgconn.flush()
            wait_until(lambda: admin.execute(drawn).fetchone() != before, what="its id to be drawn")
            for number in range(20):
                add(outbox_postgres, str(number))
                settle(source_, source_.fetch(10))
        slow.commit()
        with admin.transaction():
            admin.execute(lock[1].encode())
            Outbox().add(admin, Event("Stock", "tea", "CountedAgain"))
    assert [claim.event_type for claim in source_.fetch(10)] == ["Counted", "CountedAgain"]
    source_.close()
