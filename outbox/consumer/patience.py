"""How long a run waits for servers that are away.

Patience counts from the start of the first request that got no answer, and no request waits longer than what is left,
so a run gives up on time even if a server never answers. This applies to requests that may wait forever: those to
Kafka, and connecting to Postgres. ``Patience.ask`` says how long they may take.

| what fails                                     | patience counts from                            |
|------------------------------------------------|-------------------------------------------------|
| a request to Kafka, connecting to Postgres     | when it began                                   |
| reading messages in the driver                 | when the last message came                      |
| a statement, or a task of Spark's              | when it failed: until then it may have been work |
| the next attempts, until one succeeds          | the same as before                              |

An attempt that has had an answer is not ended by its next request, which gets a few seconds in any case.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from outbox.consumer.errors import ConsumerUnavailable

LEAST_SECONDS: Final = 2.0
"""The least that a request gets before anything has failed, whatever the patience: libpq's own minimum."""
ANSWERED_SECONDS: Final = 5.0
"""The least that a request gets in an attempt that has had an answer, even if patience has ended meanwhile: the work
may take long, and one earlier failure must not end an attempt while the servers answer."""

_CURRENT: ContextVar[Patience | None] = ContextVar("outbox_patience", default=None)


class NoTimeLeft(ConsumerUnavailable):
    """A request was not sent: no time is left for its answer."""


class Patience:
    """The patience of one run, over all its attempts. ``seconds`` None: it never ends."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._since: float | None = None
        self._silent_since: float | None = None
        self._answered = False

    @property
    def left(self) -> float:
        """How many more seconds to wait for servers."""
        if self.seconds is None:
            return math.inf
        return self.seconds - (0.0 if self._began is None else self._clock() - self._began)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Limit the requests of this thread to what is left."""
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
        """Start over: an attempt has succeeded, or has made progress."""
        self._since = self._silent_since = None

    @property
    def _began(self) -> float | None:
        """When the first unanswered request began, in this attempt or an earlier one."""
        return min((one for one in (self._since, self._silent_since) if one is not None), default=None)

    @contextmanager
    def ask(self, longest: float) -> Iterator[float]:
        """Limit a request that may never be answered. Yields how many seconds it may take, at most ``longest``.

        Raises NoTimeLeft when no patience is left.
        """
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
        """Return how many seconds a server may take to answer now, at most ``seconds``; 0 or less: none."""
        least = LEAST_SECONDS if self._began is None else ANSWERED_SECONDS if self._answered else 0.0
        return min(seconds, max(self.left, least))

    def silent(self, since: float) -> None:
        """Record the time, by the clock, since which a server has not answered."""
        self._silent_since = since if self._silent_since is None else min(self._silent_since, since)


def current() -> Patience:
    """Return the patience of this thread's run; outside of a run, one that never ends."""
    return _CURRENT.get() or Patience(None)
