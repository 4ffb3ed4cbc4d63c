"""The options of every Kafka client, and the reason why its connections fail."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from outbox._clients import credentials
from outbox._clients.callbacks import CALLBACKS, raising
from outbox._clients.kafka_rules import require_verification
from outbox._clients.variables import variable
from outbox.errors import ConfigurationError


def complete(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for librdkafka, with the callback for tokens where the client needs it.

    The errors of callbacks that a service gives arrive in its consumer or transformer: see ``callbacks.raising``.

    Raises ConfigurationError for an option that would send credentials and events to a server that is not verified.
    """
    require_verification(options)
    given = {name: raising(options[name]) for name in CALLBACKS & options.keys() if callable(options[name])}
    return {**options, **given, **credentials.token_callback(options)}


_FILES: Final = tuple(f"ssl.{name}.location" for name in ("ca", "crl", "certificate", "key", "keystore"))


class Certificates:
    """The files of certificates and keys that a client reads, once, when it is made: after this object.

    failed  the error of a connection, once it failed after they were replaced: only another client connects.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.failed: KafkaError | None = None
        self._files = [Path(options[name]) for name in _FILES if options.get(name)]
        self._given: Callable[[KafkaError], object] | None = options.get("error_cb")
        self._read = self._seen = self._versions()

    def replaced(self) -> bool:
        """Return whether the files are others, as at the last look: a key comes a moment before its certificate."""
        before, self._seen = self._seen, self._versions()
        return self._seen == before != self._read

    def hear(self, error: KafkaError) -> None:
        """Be the client's ``error_cb``, and call that of the options."""
        if self.failed is None and self.replaced():
            self.failed = error
        if self._given is not None:
            self._given(error)

    def _versions(self) -> list[tuple[object, ...]]:
        found: list[tuple[object, ...]] = []
        for file in self._files:
            with suppress(OSError):
                now = file.stat()
                found.append((file, now.st_ino, now.st_mtime_ns, now.st_size))
        return found


_UNKNOWN: Final = re.compile(r'No such configuration property: "(.+)"')


class OptionsRefused(ConfigurationError):
    """librdkafka takes no client with these options: it does not know one, or can't read a file that one names."""


def refused_options(error: KafkaException) -> OptionsRefused:
    """Return the error for options that librdkafka refuses, with the variable of one that it does not know."""
    inner = error.args[0]
    text = inner.str() if isinstance(inner, KafkaError) else str(error)
    unknown = _UNKNOWN.search(text)
    if unknown is not None:
        text += f"; it comes from {variable(('kafka', unknown[1]))}, or from [kafka] in the file"
    return OptionsRefused(f"Kafka options: {text}")


CIRCUMSTANCES: Final = re.compile(r" \(after \d+ms in state .*\)$")
"""How long it took, and how many errors were left out: different each time, and no part of the reason."""
_UNVERIFIED: Final = "certificate verify failed"


class ConnectionErrors:
    """Why the connections of one client fail.

    librdkafka reports that to ``error_cb`` alone, when the client is polled. A request fails with "transport failure",
    or times out. Each client has one of these: the reason of one cluster's failure must not explain another's.
    """

    def __init__(self) -> None:
        self._last = ""

    def hear(self, error: KafkaError) -> None:
        """Keep the error if it is such a reason. The client's ``error_cb`` is this method, or calls it."""
        if error.code() not in {KafkaError._SSL, KafkaError._AUTHENTICATION, KafkaError._RESOLVE}:
            return
        self._last = CIRCUMSTANCES.sub("", error.str())
        if _UNVERIFIED in self._last:
            # librdkafka's text is the same for an unknown authority and for a certificate of another host.
            self._last += "; the certificate must also name this host"

    def forget(self) -> None:
        """Forget the reason, because a request has been answered."""
        self._last = ""

    @property
    def reason(self) -> str:
        """The reason, to be appended to a text; empty if there is none."""
        return f"; a connection failed: {self._last}" if self._last else ""

    def reason_for(self, error: KafkaError) -> str:
        """Return the reason, to be appended to the text of this error; empty if it can't have caused the error."""
        caused = {
            KafkaError._TRANSPORT,
            # What a request to a broker that cannot be connected may end with, when its address is replaced.
            KafkaError._DESTROY,
            KafkaError._ALL_BROKERS_DOWN,
            KafkaError._TIMED_OUT,
            KafkaError._TIMED_OUT_QUEUE,
            KafkaError._MSG_TIMED_OUT,
        }
        # An exception that was explained already has it.
        return self.reason if error.code() in caused and self.reason not in error.str() else ""

    def explained(self, error: KafkaException, client: AdminClient | Producer | None = None) -> KafkaException:
        """Return the exception of a request of this client, with the reason if that can have caused it.

        Polls ``client`` first. A consumer that reads is polled by its reader: it must not be given.
        """
        if client is not None:
            _serve(client)
        inner = error.args[0]
        if not isinstance(inner, KafkaError) or not (reason := self.reason_for(inner)):
            return error
        flags = inner.fatal(), inner.retriable(), inner.txn_requires_abort()
        return KafkaException(KafkaError(inner.code(), inner.str() + reason, *flags))

    @contextmanager
    def explaining(self, client: AdminClient | Producer) -> Iterator[None]:
        """Add the reason to the KafkaException of a request that is made, and awaited, in this block."""
        try:
            yield
        except KafkaException as error:
            explained = self.explained(error, client)
            if explained is error:
                raise
            raise explained from error
        # What is still queued is older than the answer.
        _serve(client)
        self.forget()


def _serve(client: AdminClient | Producer) -> None:
    # A producer's fatal error is raised here again.
    with suppress(KafkaException):
        client.poll(0)
