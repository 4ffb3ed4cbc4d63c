"""The rows of a task, and the proof that they are complete.

The end of an iterator proves nothing: when something upstream of ``mapInArrow`` fails (a transform, a decoder, the
Kafka reader), Spark closes the input of the Python worker between two Arrow messages, and the rows end as if all had
come. A COMMIT after that would take a part for the whole. So every input of a task has a way to prove its end, which
the sink's transaction requires before COMMIT.

| where the rows come from   | the proof                                                                              |
|----------------------------|----------------------------------------------------------------------------------------|
| Kafka (``reader``)         | Kafka has sent a message, or the end of what is committed, at the range's end or later |
| Spark (``from_spark``)     | END_OF_STREAM is next in the worker's input; Spark writes it after the last row        |
| a list (``in_memory``)     | all rows were in memory                                                                |
| none (``NO_INPUT``)        | not needed: the driver's own transactions read no rows, and tasks prove theirs         |
"""

from __future__ import annotations

import inspect
import io
import os
import select
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from outbox.consumer.errors import JobError
from spark_jobs.errors import InputCut

if TYPE_CHECKING:
    import pyarrow as pa

END_OF_STREAM: Final = b"\xff\xff\xff\xfc"
"""pyspark.serializers.SpecialLengths.END_OF_STREAM in its wire format."""
_WORKER: Final = "pyspark.worker"
# On systems without this event, an input that ends within the four bytes blocks until Spark ends the worker.
_PEER_CLOSED: Final = getattr(select, "POLLRDHUP", 0)
_POLL_MILLISECONDS: Final = 10


Stream = io.BufferedReader | io.BufferedRWPair
"""The input of a Python worker: the first type if the daemon has started it, otherwise the second."""


Batch = TypeVar("Batch")


class Progress(Protocol):
    """How much of a range has been read.

    at    the offset before which no message is outstanding; may be beyond the range once that is complete.
    size  bytes, of messages also that are not among the batches.
    """

    at: int
    size: int


class TaskInput(Generic[Batch]):
    """The batches of a task, to be read once: Arrow batches from Spark, or Messages from Kafka.

    check_end  called when the batches end; raises InputCut unless they are complete.
    progress   how much was read, if that is known.
    """

    def __init__(
        self, batches: Iterable[Batch], check_end: Callable[[], None], progress: Progress | None = None
    ) -> None:
        self._given = batches
        self._batches = iter(batches)
        self._check_end = check_end
        self._progress = progress
        self._whole = False

    def again(self) -> TaskInput[Batch]:
        """Return the same input from its beginning; only if its batches are in memory."""
        assert isinstance(self._given, Sequence)
        return TaskInput(self._given, self._check_end, self._progress)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        try:
            return next(self._batches)
        except StopIteration:
            if not self._whole:
                # Checked before the effect runs and not only before COMMIT: an effect may reach beyond the transaction.
                self._check_end()
                self._whole = True
            raise

    def require_whole(self) -> None:
        """Raise InputCut unless the batches were read to a proved end."""
        if not self._whole:
            raise InputCut("the task has not read its input to the end and must not commit; nothing was committed")

    @property
    def size(self) -> int:
        """How many bytes have been read so far; 0 if it is not known."""
        return self._progress.size if self._progress is not None else 0

    @property
    def reached(self) -> int | None:
        """The offset before which there is no further message; None before the end, and if it is not known."""
        return self._progress.at if self._progress is not None and self._whole else None


def in_memory(batches: Sequence[pa.RecordBatch]) -> TaskInput[pa.RecordBatch]:
    """Return batches that are in memory as an input."""
    return TaskInput(batches, lambda: None)


NO_INPUT: Final = in_memory(())
"""The input of a transaction that reads no rows."""
# It is at its end, so there is nothing to prove.
next(NO_INPUT, None)


def from_spark(batches: Iterable[pa.RecordBatch]) -> TaskInput[pa.RecordBatch]:
    """Return the batches that Spark passes to a function of ``mapInArrow`` as an input; call it in that function.

    Raises JobError if the worker's input can't be found.
    """
    stream = worker_stream()
    return TaskInput(batches, lambda: check_end(stream))


def worker_stream() -> Stream:
    """Return the input of the Python worker that runs the caller. Raises JobError."""
    frame = inspect.currentframe()
    while frame is not None:
        # __spec__, because __name__ is __main__ when the worker runs with -m, without the daemon.
        module = getattr(frame.f_globals.get("__spec__"), "name", None)
        if (module, frame.f_code.co_name) == (_WORKER, "main"):
            stream = frame.f_locals.get("infile")
            if isinstance(stream, io.BufferedReader | io.BufferedRWPair):
                return stream
            break
        frame = frame.f_back
    raise JobError(
        "the end of the task's input can't be checked, because the input of PySpark's Python worker was not found: "
        "nothing was committed. Run the job with PySpark's own worker, of a version that the consumer supports: remove "
        "spark.python.worker.module and spark.python.daemon.module, and install the driver's PySpark on the executors"
    )


def check_end(stream: Stream) -> None:
    """Wait for the next bytes and raise InputCut unless they are END_OF_STREAM, which is left for the worker."""
    found = _peek(stream, len(END_OF_STREAM))
    if found != END_OF_STREAM:
        raise InputCut(
            f"the task's rows ended, and {found!r} follows instead of Spark's mark for their end: something upstream "
            "failed (the transform, the decoder or the Kafka reader). Nothing was committed; a retry reads the same "
            "range again"
        )


def _peek(stream: Stream, count: int) -> bytes:
    """Return the next bytes without consuming them; fewer if the stream ends before."""
    found = stream.peek(count)[:count]
    if len(found) in {0, count}:
        return found
    # peek() does not refill a buffer that is not empty: the rest is read from the socket.
    try:
        number = stream.fileno()
    except io.UnsupportedOperation:
        # A BufferedRWPair hides its socket: the end is not proved, and Spark retries.
        return found
    with socket.socket(fileno=os.dup(number)) as rest:
        closed = select.poll()
        closed.register(rest, _PEER_CLOSED)
        last = False
        while True:
            more = rest.recv(count - len(found), socket.MSG_PEEK)
            if last or len(found) + len(more) == count:
                return found + more
            # recv() no longer blocks once some of the bytes are there.
            last = bool(closed.poll(_POLL_MILLISECONDS))
