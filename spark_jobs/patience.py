"""How long a run waits for servers that are away.

Patience counts from the beginning of the first question that got no answer, and a question waits no longer than what is
left: so a run gives up on time, however long a server keeps silent. Questions are those that a server may never answer:
requests to Kafka, and connecting to Postgres. They ask ``asking`` how long they may take.

| what fails                                     | patience counts from                            |
|------------------------------------------------|-------------------------------------------------|
| a request to Kafka, connecting to Postgres     | when it began                                   |
| reading messages in the driver                 | when the last message came                      |
| a statement, or a task of Spark's              | when it failed: until then it may have been work |
| the next attempts, until one succeeds          | the same as before                              |

An attempt that has had an answer is not ended by its next question: that one has a few seconds in any case.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from spark_jobs.errors import ConsumerUnavailable

LEAST_SECONDS: Final = 2.0
"""A question has so long before anything has failed, also with less patience: psycopg's and libpq's own minimum."""
ANSWERED_SECONDS: Final = 5.0
"""And so long in an attempt that has had an answer, also when patience has ended meanwhile: an attempt may take long by
its work, and one earlier failure must not end it while the servers answer."""

_CURRENT: ContextVar[Patience | None] = ContextVar("outbox_patience", default=None)


class NoTimeLeft(ConsumerUnavailable):
    """A question was not asked: there is no patience left for its answer."""


class Patience:
    """The patience of one run, over its attempts. None: it never ends."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._since: float | None = None
        self._silent_since: float | None = None
        self._answered = False

    @property
    def left(self) -> float:
        """Return for how many seconds more servers are waited for."""
        if self.seconds is None:
            return math.inf
        return self.seconds - (0.0 if self._began is None else self._clock() - self._began)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Limit the questions of this thread to what is left."""
        self._silent_since = None
        self._answered = False
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)

    def failed(self) -> None:
        """Note that the attempt has failed, because a server is away."""
        if self._silent_since is None:
            self._silent_since = self._clock()
        self._since = self._began

    def renew(self) -> None:
        """Begin anew: an attempt has succeeded, or has got further."""
        self._since = self._silent_since = None

    @property
    def _began(self) -> float | None:
        """When the first question began that got no answer, of the attempts before or of this one."""
        return min((one for one in (self._since, self._silent_since) if one is not None), default=None)

    @contextmanager
    def ask(self, longest: float) -> Iterator[float]:
        """See ``asking``."""
        most = self.longest(longest)
        if most <= 0:
            raise NoTimeLeft("no patience is left for a server's answer")
        began = self._clock()
        try:
            yield most
        except BaseException:
            self.silent(began)
            raise
        self._silent_since = None
        self._answered = True

    def longest(self, seconds: float) -> float:
        """Return how long a server may keep silent now, at most so many seconds; nothing or less: not at all."""
        least = LEAST_SECONDS if self._began is None else ANSWERED_SECONDS if self._answered else 0.0
        return min(seconds, max(self.left, least))

    def silent(self, since: float) -> None:
        """Note since when, by the clock, a server has not answered."""
        self._silent_since = since if self._silent_since is None else min(self._silent_since, since)


@contextmanager
def asking(longest: float) -> Iterator[float]:
    """Ask a server that may never answer. Yields how many seconds that may take: at most ``longest``.

    Raises NoTimeLeft when this thread's run has no patience left.
    """
    patience = _CURRENT.get()
    if patience is None:
        yield longest
        return
    with patience.ask(longest) as most:
        yield most


def at_most(longest: float) -> float:
    """Return how many seconds a server may keep silent in this thread's run: at most ``longest``."""
    patience = _CURRENT.get()
    return longest if patience is None else patience.longest(longest)


def silent(since: float) -> None:
    """Note for this thread's run since when, by the monotonic clock, nothing has come from a server."""
    patience = _CURRENT.get()
    if patience is not None:
        patience.silent(since)
