"""The proof of an input's end, over real sockets: what a Python worker may find behind its rows."""

from __future__ import annotations

import io
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import nullcontext

import pyarrow as pa
import pytest
from pyspark.serializers import SpecialLengths, write_int

from outbox.consumer.errors import JobError
from spark_jobs.errors import InputCut
from spark_jobs.task import input as task_input

BATCH = pa.RecordBatch.from_pydict({"n": [1, 2]})
Pair = tuple[socket.socket, io.BufferedReader]


@pytest.fixture(params=["unix", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Spark's end of a worker's socket, and the stream that the worker reads, opened as PySpark's daemon does."""
    if request.param == "unix":
        spark, worker = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            spark = socket.create_connection(server.getsockname())
            worker, _ = server.accept()
    with spark, worker, os.fdopen(os.dup(worker.fileno()), "rb", 65536) as stream:
        yield spark, stream


def arrow(*batches: pa.RecordBatch) -> bytes:
    """Return an Arrow stream without its end, as it is when Spark gives up between two messages."""
    sink = io.BytesIO()
    writer = pa.ipc.new_stream(sink, BATCH.schema)
    for batch in batches:
        writer.write_batch(batch)
    cut = sink.getvalue()
    writer.close()
    return cut


def whole(*batches: pa.RecordBatch) -> bytes:
    return arrow(*batches) + b"\xff\xff\xff\xff\0\0\0\0"


def test_the_mark_is_pysparks() -> None:
    sent = io.BytesIO()
    write_int(SpecialLengths.END_OF_STREAM, sent)
    assert sent.getvalue() == task_input.END_OF_STREAM


def read(stream: task_input.Stream) -> task_input.TaskInput:
    return task_input.TaskInput(pa.ipc.open_stream(stream), lambda: task_input.check_end(stream))


def test_the_mark_is_seen_and_left_for_the_worker(pair: Pair) -> None:
    spark, stream = pair
    spark.sendall(whole(BATCH, BATCH) + task_input.END_OF_STREAM)
    rows = read(stream)
    with pytest.raises(InputCut, match="not read its input to the end"):
        rows.require_whole()
    assert [batch.num_rows for batch in rows] == [2, 2]
    rows.require_whole()
    assert next(rows, None) is None
    assert stream.read(4) == task_input.END_OF_STREAM


@pytest.mark.parametrize(
    "sent",
    [
        arrow(BATCH),
        *(whole(BATCH) + behind for behind in (b"", b"\xff", b"\xff\xff\xff", b"\xff" * 4, b"\0\0\0\4more")),
    ],
)
def test_anything_else_is_a_part(pair: Pair, sent: bytes) -> None:
    spark, stream = pair
    spark.sendall(sent)
    spark.shutdown(socket.SHUT_WR)
    rows = read(stream)
    assert next(rows).num_rows == 2
    with pytest.raises(InputCut, match="Nothing was committed"):
        next(rows)
    with pytest.raises(InputCut):
        rows.require_whole()


@pytest.mark.parametrize("first", range(4))
def test_a_mark_that_comes_in_pieces_is_waited_for(pair: Pair, first: int) -> None:
    """The first bytes are in the stream's buffer with the rows; the others come when the task already waits."""
    spark, stream = pair
    mark = task_input.END_OF_STREAM
    spark.sendall(whole(BATCH) + mark[:first])
    rows = read(stream)
    next(rows)
    done: list[BaseException | None] = []

    def finish() -> None:
        try:
            done.append(next(rows, None))
        except InputCut as error:
            done.append(error)

    waiting = threading.Thread(target=finish)
    waiting.start()
    for byte in mark[first:]:
        # It may not be waiting yet, which is the same; it must not be done.
        waiting.join(0.03)
        assert not done
        spark.sendall(bytes([byte]))
    waiting.join(10)
    assert done == [None]
    assert stream.read(4) == mark


def test_a_mark_that_breaks_off_behind_the_buffer(pair: Pair) -> None:
    spark, stream = pair
    spark.sendall(whole(BATCH) + task_input.END_OF_STREAM[:2])
    rows = read(stream)
    next(rows)
    ending = threading.Timer(0.05, spark.shutdown, (socket.SHUT_WR,))
    ending.start()
    with pytest.raises(InputCut, match=r"xff.xff' follows"):
        next(rows)
    ending.join()


def test_a_worker_without_the_daemon_has_a_pair_of_buffers() -> None:
    """It hides its socket: the mark is seen in one piece, and anything less is no proof."""
    for behind, proved in ((task_input.END_OF_STREAM, True), (task_input.END_OF_STREAM[:2], False), (b"", False)):
        spark, worker = socket.socketpair()
        with spark, worker, worker.makefile("rwb", 65536) as stream:
            assert isinstance(stream, io.BufferedRWPair)
            spark.sendall(whole(BATCH) + behind)
            spark.shutdown(socket.SHUT_WR)
            rows = read(stream)
            next(rows)
            with nullcontext() if proved else pytest.raises(InputCut):
                assert next(rows, None) is None


def test_where_no_worker_runs_nothing_can_be_proved() -> None:
    with pytest.raises(JobError, match=r"nothing was committed.*spark\.python\.worker\.module"):
        task_input.from_spark(iter(()))


def test_rows_in_memory_are_whole_when_they_are_read() -> None:
    rows = task_input.in_memory([BATCH])
    with pytest.raises(InputCut):
        rows.require_whole()
    assert list(rows) == [BATCH]
    rows.require_whole()
