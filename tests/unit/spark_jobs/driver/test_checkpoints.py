"""Which batch of a stream follows what the sink has, and which can't be known to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from outbox.consumer.errors import JobError
from spark_jobs.dedup.strategies import Dedup, Natural, OffsetsOnly
from spark_jobs.driver.checkpoints import KEPT, NOTHING, Batch, Stored, content_of, decide, planned_in
from spark_jobs.driver.stream_group import StreamGroup, StreamOptions
from spark_jobs.errors import CheckpointConflict
from spark_jobs.job import ConsumerJob

HERE = Stored("q", 5, "five four three two")


def batch(number: int, content: str, before: str | None, query: str = "q") -> Batch:
    return Batch(query, "run", number, content, before)


def decided(stored: Stored | None, one: Batch, **given: object) -> str:
    options = {"accept": None, "ids": False, "from_beginning": False} | given
    return decide("g", stored, one, **options)  # type: ignore[arg-type]


def test_what_follows_is_applied_and_what_is_there_is_not_applied_again():
    assert decided(None, batch(0, "zero", None)) == "apply"
    assert decided(HERE, batch(6, "six", "five")) == "apply"
    assert decided(HERE, batch(5, "five", "four")) == "applied"
    # Whatever else is declared.
    assert decided(HERE, batch(5, "five", None), accept=HERE.state, ids=True, from_beginning=True) == "applied"


@pytest.mark.parametrize(
    ("stored", "one", "why"),
    [
        (None, batch(1, "one", "zero"), "nothing shows whether"),
        (HERE, batch(0, "zero", None, "another"), "a new one"),
        (HERE, batch(6, "six", "five", "another"), "a new one"),
        (HERE, batch(5, "other", "four"), "an older copy"),
        (HERE, batch(3, "three", "two"), "an older copy"),
        (HERE, batch(0, "zero", None), "a new one or was emptied"),
        (HERE, batch(6, "six", "other"), "continued elsewhere"),
        (HERE, batch(6, "six", None), "continued elsewhere"),
        (HERE, batch(7, "seven", "six"), "put back"),
    ],
)
def test_what_can_not_be_known_is_refused_until_it_is_accepted(stored, one, why):
    with pytest.raises(CheckpointConflict, match=why) as caught:
        decided(stored, one)
    state = caught.value.state
    assert state == (NOTHING if stored is None else "q/5/five")
    assert repr(state) in str(caught.value)
    assert decided(stored, one, accept=state) == "accepted"
    # It was said of another state.
    with pytest.raises(CheckpointConflict):
        decided(stored, one, accept="q/4/four")


def test_with_ids_an_older_checkpoint_repeats_what_is_known_and_leaves_nothing_out():
    for number, before in ((3, "two"), (5, "four")):
        assert decided(HERE, batch(number, "x", before), ids=True) == "apply"
    # These were planned before the ones that the sink has: another query of the checkpoint is ahead.
    for number, content, before in ((2, "two", None), (3, "three", "two"), (4, "four", "three")):
        assert decided(HERE, batch(number, content, before), ids=True) == "applied"
        assert decided(HERE, batch(number, content, before), ids=True, accept=HERE.state) == "applied"
    # Something is missing in these, which ids do not bring back.
    for one in (batch(6, "six", "other"), batch(7, "seven", "six")):
        with pytest.raises(CheckpointConflict):
            decided(HERE, one, ids=True, from_beginning=True)


@pytest.mark.parametrize(("number", "before"), [(5, "other"), (4, "four"), (3, None), (2, "one")])
def test_with_ids_a_copy_that_was_continued_elsewhere_may_have_read_further(number, before):
    one = batch(number, "x", before)
    with pytest.raises(CheckpointConflict, match=f"precedes this batch {number}.* continued elsewhere") as caught:
        decided(HERE, one, ids=True, from_beginning=True)
    assert decided(HERE, one, ids=True, accept=caught.value.state) == "accepted"


def test_the_sink_keeps_what_precedes_its_batch():
    assert batch(0, "zero", None).contents_after(None) == "zero"
    assert batch(6, "six", "five").contents_after(HERE) == "six five four three two"
    # An older copy, a new query, and what was accepted.
    assert batch(4, "x", "three").contents_after(HERE) == "x three two"
    for one in (batch(0, "x", None), batch(0, "x", None, "another"), batch(6, "x", "other"), batch(9, "x", "eight")):
        assert one.contents_after(HERE) == "x"
    stored = Stored("q", 0, "0")
    for number in range(1, 2 * KEPT):
        one = batch(number, str(number), str(number - 1))
        assert decided(stored, one) == "apply"
        stored = Stored("q", number, one.contents_after(stored))
    assert stored.contents.split() == [str(number) for number in range(2 * KEPT - 1, KEPT - 1, -1)]


def test_with_ids_a_new_checkpoint_has_to_begin_at_the_beginning():
    # Also one that was emptied but for its query's id.
    for new in (batch(0, "zero", None, "another"), batch(0, "zero", None)):
        with pytest.raises(CheckpointConflict, match="a new one or was emptied"):
            decided(HERE, new, ids=True)
        with pytest.raises(CheckpointConflict):
            decided(HERE, new, from_beginning=True)
        assert decided(HERE, new, ids=True, from_beginning=True) == "apply"
    with pytest.raises(CheckpointConflict):
        decided(HERE, batch(1, "one", "zero", "another"), ids=True, from_beginning=True)


def plan(planned_at: int, *offsets: str, **more: object) -> str:
    return "\n".join(["v1", json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": planned_at} | more), *offsets])


def test_a_plan_is_when_it_was_made_and_where_the_sources_end():
    same = content_of(plan(1, '{"t":{"0":1,"1":2}}', "7"))
    assert content_of(plan(1, '{"t":{"1":2,"0":1}}', "7", conf={"a": "b"})) == same
    others = [
        plan(2, '{"t":{"0":1,"1":2}}', "7"),
        plan(1, '{"t":{"0":1,"1":3}}', "7"),
        plan(1, '{"t":{"0":1,"1":2}}'),
        plan(1, "7", '{"t":{"0":1,"1":2}}'),
        plan(1, '{"t":{"0":1,"1":2}}', "-"),
    ]
    assert len({same, *map(content_of, others)}) == 1 + len(others)


@pytest.mark.parametrize("text", ["v9\n", "v1\n{}\n7", "v1\n[]\n7", "", "v1\nnot json\n"])
def test_an_unknown_form_of_the_log_is_no_proof(text):
    with pytest.raises(JobError, match="not known"):
        content_of(text)


@pytest.mark.parametrize(
    ("name", "value"), [("schema", "a int"), ("types", ["a"]), ("keep_order", True), ("start", "latest")]
)
def test_what_is_about_messages_of_kafka_is_refused(name, value):
    job = ConsumerJob("g", effect="SELECT 1", **{name: value})
    with pytest.raises(JobError, match=f"{name}: has no meaning"):
        StreamGroup(job, StreamOptions("postgresql://h/d", "consumer", 14), "owner")


@pytest.mark.parametrize(
    "strategy",
    [Dedup(key="idempotency-key"), Dedup(allow_producer_repeats=True), OffsetsOnly(), Natural(["message_id"])],
)
def test_a_strategy_that_a_stream_would_ignore_is_refused(strategy):
    """It has no headers by which to recognize a row, and no place of a message."""
    job = ConsumerJob("g", effect="SELECT 1", strategy=strategy)
    with pytest.raises(JobError, match=r"^strategy: .* is for Kafka's messages; .* Leave strategy out"):
        StreamGroup(job, StreamOptions("postgresql://h/d", "consumer", 14), "owner")
    StreamGroup(replace(job, strategy=Dedup()), StreamOptions("postgresql://h/d", "consumer", 14), "owner")


def test_repeats_of_rows_without_ids_are_not_known():
    group = StreamGroup(
        ConsumerJob("g", effect="SELECT 1"), StreamOptions("postgresql://h/d", "consumer", 14, from_beginning=True), "o"
    )
    with pytest.raises(JobError, match=r"from_beginning: .*no column message_id"):
        group.decide(None, batch(0, "zero", None), {"n": "bigint"})
    assert group.decide(None, batch(0, "zero", None), {"n": "bigint", "message_id": "uuid"}) == "apply"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of Spark's with batches 1 and 2; the plan of batch 0 was purged."""
    folder = tmp_path / "a check point"
    (folder / "offsets").mkdir(parents=True)
    (folder / "metadata").write_text('{"id":"q"}')
    for number in (1, 2):
        (folder / "offsets" / str(number)).write_text(plan(number))
    return folder


def test_a_plan_is_read_from_the_checkpoints_files(checkpoint, monkeypatch):
    one, two = (content_of(plan(number)) for number in (1, 2))
    monkeypatch.chdir(checkpoint.parent)
    for folder in (str(checkpoint), checkpoint.as_uri(), checkpoint.name):
        assert planned_in(folder, 2, "r") == Batch("q", "r", 2, two, one)
    assert planned_in(str(checkpoint), 1, "r") == Batch("q", "r", 1, one, None)


@pytest.mark.parametrize("folder", ["/nowhere", "dbfs:/nowhere", "s3a://"])
def test_a_checkpoint_that_python_can_not_read(folder):
    with pytest.raises(
        JobError, match=f"checkpointLocation {folder}: the driver's Python can't read the plan of batch 0"
    ):
        planned_in(folder, 0, "r")


def test_a_batch_without_a_plan_is_refused(checkpoint):
    with pytest.raises(JobError, match="asynchronous progress tracking has to be off"):
        planned_in(str(checkpoint), 3, "r")
    (checkpoint / "metadata").write_text("?")
    with pytest.raises(JobError, match="can't read the plan of batch 2"):
        planned_in(str(checkpoint), 2, "r")
