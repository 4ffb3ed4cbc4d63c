"""What a message of Kafka says, whatever it was written by: its headers and its time, and how dead letters store both.

Brokers accept header names and timestamps that their clients can't handle. If a name is not UTF-8, confluent-kafka's
``Message.headers()`` returns a list with a pair that lacks its name, and leaves an exception set: a caller in C raises
SystemError, Python's own specialized calls do not. A second call returns the same list without an exception, and using
it crashes the process. So all readers ask here, once for each message.
"""

from __future__ import annotations

import base64
import datetime as dt
import gc
from collections.abc import Iterable, Mapping, Sequence
from operator import methodcaller
from typing import Any, Final, TypeVar, cast

import orjson

Headers = Sequence[tuple[str, bytes | None]]

NOT_UTF8: Final = "the name of a header is not UTF-8"
"""The error of a message with UndecodableHeaders."""

FIRST_TIME, LAST_TIME = (
    int(dt.datetime(*day, tzinfo=dt.UTC).timestamp()) * 1_000 for day in ((1, 1, 2), (9999, 12, 30))
)
"""The first and the last timestamp, in milliseconds of Unix time, that Postgres stores and Python loads, in all time
zones."""

_UNKNOWN_NAME: Final = "(a name that is not UTF-8)"
_RAW_NAME: Final = "key_base64"
# Called from C, which checks for an exception beside a result; Python's own calls, once specialized, do not.
_call_headers: Final = methodcaller("headers")

M = TypeVar("M")


class UndecodableHeaders(list[tuple[str, bytes | None]]):
    """Headers with names that are not UTF-8; these are shown with escapes. Such a message becomes a dead letter.

    raw_names  by their index, the bytes of these names; None for those that the client does not say.
    """

    def __init__(self, headers: Iterable[tuple[str, bytes | None]], raw_names: Mapping[int, bytes | None]) -> None:
        super().__init__(headers)
        self.raw_names = dict(raw_names)


class UndecodableMessage:
    """A client's message with UndecodableHeaders, which can be asked for them any number of times."""

    def __init__(self, message: Any, headers: UndecodableHeaders) -> None:
        self._message = message
        self._headers = headers

    def headers(self) -> UndecodableHeaders:
        return self._headers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._message, name)


def headers_of(messages: Sequence[Any]) -> list[Headers]:
    """Return the headers of messages, UndecodableHeaders for those with names that are not UTF-8.

    To be called once for each message: the client names the bytes in its first answer only.
    """
    found: list[Headers] = []
    answers = map(_call_headers, messages)
    while True:
        try:
            for headers in answers:
                found.append(headers or [])  # noqa: PERF401  continues after an error
        except (SystemError, UnicodeDecodeError) as error:
            found.append(_undecodable(messages[len(found)], error))
        else:
            return found


def headers_again(message: Any) -> Headers:
    """Return a message's headers like ``headers_of``, also if its client was asked for them before."""
    (found,) = headers_of([message])
    if type(found) is list and found and type(found[0]) is tuple and not _complete(found):
        return _undecodable(message, None)
    return found


def checked(message: M) -> M:
    """Return the message, or an UndecodableMessage in its place. To be called once, before anyone else has it."""
    headers = headers_again(message)
    return cast("M", UndecodableMessage(message, headers)) if isinstance(headers, UndecodableHeaders) else message


def _complete(headers: Sequence[tuple[Any, ...]]) -> bool:
    # A missing item is no referent. Nothing else can find it without touching it.
    return len(gc.get_referents(*headers)) == 2 * len(headers)


def _undecodable(message: Any, error: BaseException | None) -> UndecodableHeaders:
    first: bytes | None = None
    while error is not None:
        if isinstance(error, UnicodeDecodeError):
            first = error.object
        error = error.__cause__ or error.__context__
    try:
        given = _call_headers(message) or []
    except (SystemError, UnicodeDecodeError):
        return UndecodableHeaders([(_shown(first), None)], {0: first})
    found: list[tuple[str, bytes | None]] = []
    raw_names: dict[int, bytes | None] = {}
    for number, pair in enumerate(given):
        if _complete([pair]):
            found.append(pair)
        else:
            raw_names[number] = None if raw_names else first
            found.append((_shown(raw_names[number]), pair[1]))
    return UndecodableHeaders(found, raw_names)


def _shown(name: bytes | None) -> str:
    return _UNKNOWN_NAME if name is None else name.decode("utf-8", "backslashreplace")


def stored_headers(headers: Headers) -> str:
    """Return headers as the JSON that a dead letter keeps: ``[{"key": name, "value": base64 or null}, …]``.

    A name that is not UTF-8 has ``key_base64`` beside it: its bytes, or null.
    """
    listed = [{"key": name.replace("\0", "\ufffd"), "value": _base64(value)} for name, value in headers]
    if isinstance(headers, UndecodableHeaders):
        for number, name in headers.raw_names.items():
            listed[number][_RAW_NAME] = _base64(name)
    return orjson.dumps(listed).decode()


def loaded_headers(stored: Sequence[Mapping[str, str | None]]) -> Headers:
    """Return the headers that ``stored_headers`` was given."""
    found = [(str(one["key"]), _bytes(one["value"])) for one in stored]
    raw_names = {number: _bytes(one[_RAW_NAME]) for number, one in enumerate(stored) if _RAW_NAME in one}
    return UndecodableHeaders(found, raw_names) if raw_names else found


def storable_time(milliseconds: int) -> int:
    """Return a message's timestamp within what Postgres and Python know: a producer may have sent microseconds."""
    return min(max(milliseconds, FIRST_TIME), LAST_TIME)


def _base64(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode()


def _bytes(value: str | None) -> bytes | None:
    return None if value is None else base64.b64decode(value)
