"""The rows of a task, and the proof that they were all of them.

An iterator that ends proves nothing: when something upstream of ``mapInArrow`` fails (a transform, a decoder, the Kafka
reader), Spark closes the input of the Python worker between two Arrow messages, and the rows end as if all had come. A
COMMIT after that would take a part for the whole. So every input of a task names what proves its end, and
the sink's transaction asks for that proof before COMMIT.

| where the rows come from   | the proof                                                                             |
|----------------------------|---------------------------------------------------------------------------------------|
| Kafka (``reader``)         | Kafka has sent a message, or the end of what is committed, at the range's end or later |
| Spark (``from_spark``)     | END_OF_STREAM is next in the worker's input; Spark writes it when all rows are written |
| a list (``in_memory``)     | the rows were all there before                                                        |
| none (``NO_INPUT``)        | the driver's own transactions: they read no rows, and their tasks prove theirs        |
"""

from __future__ import annotations

import inspect
import io
import os
import select
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from spark_jobs.errors import InputCut, InputUnproven

if TYPE_CHECKING:
    import pyarrow as pa

END_OF_STREAM: Final = b"\xff\xff\xff\xfc"
"""pyspark.serializers.SpecialLengths.END_OF_STREAM as it is sent."""
_WORKER: Final = "pyspark.worker"
# Where the system does not know this event, an end within the four bytes is waited for until Spark ends the worker.
_PEER_CLOSED: Final = getattr(select, "POLLRDHUP", 0)
_POLL_MILLISECONDS: Final = 10


Stream = io.BufferedReader | io.BufferedRWPair
"""What a Python worker reads from Spark: the first when the daemon has started it, else the second."""


Batch = TypeVar("Batch")


class TaskInput(Generic[Batch]):
    """The batches of a task, in one pass: of Arrow's from Spark, of messages from Kafka.

    check_end  raises InputCut unless the batches were all there are; called when they end.
    reached    says up to which offset there is no further message, once they have ended; where that is known.
    """

    def __init__(
        self, batches: Iterable[Batch], check_end: Callable[[], None], reached: Callable[[], int] | None = None
    ) -> None:
        self._batches = iter(batches)
        self._check_end = check_end
        self._reached = reached
        self._whole = False

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        try:
            return next(self._batches)
        except StopIteration:
            if not self._whole:
                # Before the effect runs and not only before COMMIT: an effect may reach beyond the transaction.
                self._check_end()
                self._whole = True
            raise

    def require_whole(self) -> None:
        """Raise InputCut unless the batches were read to an end that is proved."""
        if not self._whole:
            raise InputCut("the task has not read its input to the end and must not commit; nothing was committed")

    @property
    def reached(self) -> int | None:
        """Return the offset before which there is no further message; None before the end, and where nobody knows."""
        return self._reached() if self._reached is not None and self._whole else None


class NoInput:
    """The input of a transaction that reads no rows."""

    def require_whole(self) -> None:
        """Return: there is nothing to prove."""


NO_INPUT: Final = NoInput()


def in_memory(batches: Sequence[pa.RecordBatch]) -> TaskInput[pa.RecordBatch]:
    """Return batches that are all there as an input."""
    return TaskInput(batches, NO_INPUT.require_whole)


def from_spark(batches: Iterable[pa.RecordBatch]) -> TaskInput[pa.RecordBatch]:
    """Return the batches that Spark gives to a function of ``mapInArrow`` as an input; call it in that function.

    Raises InputUnproven where the worker's input can't be found.
    """
    stream = worker_stream()
    return TaskInput(batches, lambda: check_end(stream))


def worker_stream() -> Stream:
    """Return what the Python worker that runs the caller reads from Spark. Raises InputUnproven."""
    frame = inspect.currentframe()
    while frame is not None:
        # The daemon imports the module; without the daemon it is run with -m, and its name is __main__.
        module = getattr(frame.f_globals.get("__spec__"), "name", None)
        if (module, frame.f_code.co_name) == (_WORKER, "main"):
            stream = frame.f_locals.get("infile")
            if isinstance(stream, io.BufferedReader | io.BufferedRWPair):
                return stream
            break
        frame = frame.f_back
    raise InputUnproven(
        "the end of the task's input can't be checked, because the input of PySpark's Python worker was not found: "
        "nothing was committed. Run the job with PySpark's own worker, of a version that the consumer supports: remove "
        "spark.python.worker.module and spark.python.daemon.module, and install the driver's PySpark on the executors"
    )


def check_end(stream: Stream) -> None:
    """Raise InputCut unless END_OF_STREAM is next; wait for it, and leave it there for the worker."""
    found = _peek(stream, len(END_OF_STREAM))
    if found != END_OF_STREAM:
        raise InputCut(
            f"the task's rows ended, and {found!r} follows instead of Spark's mark for their end: something upstream "
            "failed (the transform, the decoder or the Kafka reader). Nothing was committed; another try reads the "
            "same range again"
        )


def _peek(stream: Stream, count: int) -> bytes:
    """Return the next bytes without consuming them; fewer where the stream ends before."""
    found = stream.peek(count)[:count]
    if len(found) in {0, count}:
        return found
    # peek() adds nothing to a buffer that is not empty: the rest is looked at in the socket.
    try:
        number = stream.fileno()
    except io.UnsupportedOperation:
        # A pair of buffers hides its socket: the end is not proved, and Spark tries again.
        return found
    with socket.socket(fileno=os.dup(number)) as rest:
        closed = select.poll()
        closed.register(rest, _PEER_CLOSED)
        last = False
        while True:
            more = rest.recv(count - len(found), socket.MSG_PEEK)
            if last or len(found) + len(more) == count:
                return found + more
            # Part of it is there, so recv() no longer waits.
            last = bool(closed.poll(_POLL_MILLISECONDS))
