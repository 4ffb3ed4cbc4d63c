"""Ready-made ``call``, ``cancel`` and ``ask`` for an External: one HTTP request with an Idempotency-Key.

| the answer                                          | what it means                                                  |
|-----------------------------------------------------|----------------------------------------------------------------|
| 2xx                                                 | done; the body is the response                                 |
| 301, 302, 303, 408, 409, 5xx; none, an incomplete   | the outcome is unknown: repeated with the same key             |
| one, a timeout; 101 (other 1xx precede the answer)  |                                                                |
| 421, 423, 425, 429                                  | nothing happened: repeated later, after Retry-After            |
| 401, 403, 407, 426, 428, 431, every other 3xx       | nothing happened: the settings are wrong; stuck in the end     |
| no connection, no TLS, nothing that HTTP allows     | nothing was sent: repeated later                               |
| every other 4xx, and those of ``refusals``          | refused                                                        |
| every other 4xx of an HttpAsk                       | refused is the GET, which says nothing about the call:         |
|                                                     | asked again later; stuck in the end                            |

403 is no refusal: gateways answer it for an expired key or a missing right, and would refuse every order meanwhile.
Redirects are not followed: a redirected POST may be made twice. 303 leads to the result of one that was executed, and
301 and 302 are used for that, too.
"""

from __future__ import annotations

import email.message
import email.utils
import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

from outbox.consumer.errors import JobError, shown
from outbox.external import exact_json
from outbox.external.declaration import Call, Done, OutcomeUnknown, Refused, TryLater

_UNKNOWN: Final = frozenset({301, 302, 303, 408, 409})
_NOTHING_HAPPENED: Final = frozenset({401, 403, 407, 421, 423, 425, 426, 428, 429, 431})
_LONGEST_BODY: Final = 1024 * 1024
_PORTS: Final = {"https": 443, "http": 80}


@dataclass(frozen=True, slots=True)
class HttpCall:
    """One request to a provider.

    url          http or https, or a function of the Call that returns it.
    body         a function of the Call that returns what to send as JSON, Decimals as numbers. Default: the request.
                 None: no body.
    headers      a mapping, or a function that returns it, for secrets that should not be in the declaration.
    method       of the request.
    key_header   the header with ``call.key``.
    gone_is_done 404 and 410 mean done: for a ``cancel`` of something that does not exist.
    tls          for a custom certificate authority.
    hosts        with a function as ``url``: the hosts that it may lead to, with a port where only that one is meant. A
                 request to any other is not made: a message must not choose who gets the headers.
    refusals     further 4xx that mean refused for good, as {403} if the provider answers so.

    The whole request takes ``call.timeout`` seconds at most, with connecting and TLS; the resolver of names has a
    time-out of its own. The response is stored as JSON, or as ``{"text": …}`` if it is not JSON; at most one mebibyte
    of it.
    """

    url: str | Callable[[Call], str]
    body: Callable[[Call], Any] | None = field(default=lambda call: call.request)
    headers: Mapping[str, str] | Callable[[], Mapping[str, str]] = field(default_factory=dict)
    method: str = "POST"
    key_header: str = "Idempotency-Key"
    gone_is_done: bool = False
    tls: ssl.SSLContext | None = None
    hosts: Collection[str] = ()
    refusals: Collection[int] = ()

    def __post_init__(self) -> None:
        _require_hosts(self.url, self.hosts)
        _require_verifying(self.tls)
        if not set(self.refusals) <= set(range(400, 500)):
            raise JobError("refusals: must be statuses from 400 to 499, as in {403}")

    def __call__(self, call: Call) -> Any:
        """Make the request. Returns the response; raises Refused, TryLater or OutcomeUnknown."""
        status, body, retry_after = self._request(call)
        if 200 <= status < 300 or (self.gone_is_done and status in {404, 410}):
            return body
        failure = _failure(status, body, retry_after)
        raise Refused(str(failure)) if status in self.refusals else failure

    def _request(self, call: Call) -> tuple[int, Any, float | None]:
        try:
            target = _target(self.url) if isinstance(self.url, str) else _allowed(self.url(call), self.hosts)
            content = None if self.body is None else exact_json.dumps(self.body(call)).encode()
            given = self.headers if isinstance(self.headers, Mapping) else self.headers()
            ours = {"Accept": "application/json", "Connection": "close"}
            if content is not None:
                ours["Content-Type"] = "application/json"
            headers = _merged(ours, given, {self.key_header: call.key})
        except Exception as error:
            raise TryLater(f"nothing was sent, the request can't be made: {shown(error)}") from error
        # Without the query, which may contain a secret.
        about = f"{target.scheme}://{target.netloc}{target.path}"
        deadline = time.monotonic() + call.timeout
        tls = (self.tls or ssl.create_default_context()) if target.scheme == "https" else None
        try:
            connection = _prepared(target, tls, self.method, headers, content)
        except (http.client.HTTPException, ValueError, TypeError) as error:
            # Their texts quote the query and the headers.
            problem = f"HTTP does not allow its path, or one of its headers ({type(error).__name__})"
            raise TryLater(f"{about}: nothing was sent: {problem}") from None
        try:
            try:
                # With a socket of ours it does not connect by itself.
                connection.sock = _connected(connection.host, connection.port, deadline)
                if tls is not None:
                    connection.sock = tls.wrap_socket(connection.sock, server_hostname=connection.host)
                connection.sock.settimeout(_left(deadline))
            except (OSError, ValueError) as error:
                raise TryLater(f"{about}: nothing was sent: {shown(error)}") from error
            with _ended_at(connection.sock, deadline) as ended:
                try:
                    connection.endheaders(content)
                    response = connection.getresponse()
                    read = response.read(_LONGEST_BODY)
                except (OSError, http.client.HTTPException) as error:
                    raise OutcomeUnknown(f"{about}: no answer: {shown(error)}") from error
            if ended.is_set() or (response.length and len(read) < _LONGEST_BODY):
                raise OutcomeUnknown(f"{about}: the answer ended after {len(read)} bytes")
            return response.status, _json(read), _retry_after(response.headers)
        finally:
            connection.close()


@dataclass(frozen=True, slots=True)
class HttpAsk:
    """An ``ask``: a GET that finds the outcome of a key. 404 and 410: nothing is there; other answers as for HttpCall.

    But no answer is a refusal: what a 4xx refuses is the GET, and the call may have been done.

    found  decides by the response whether something is there; a search may answer 200 with an empty list.
    hosts  as for HttpCall.
    """

    url: str | Callable[[Call], str]
    headers: Mapping[str, str] | Callable[[], Mapping[str, str]] = field(default_factory=dict)
    found: Callable[[Any], bool] = bool
    tls: ssl.SSLContext | None = None
    hosts: Collection[str] = ()

    def __post_init__(self) -> None:
        _require_hosts(self.url, self.hosts)
        _require_verifying(self.tls)

    def __call__(self, call: Call) -> Done | None:
        """Ask. Returns Done, or None for nothing; raises TryLater or OutcomeUnknown."""
        request = HttpCall(self.url, None, self.headers, "GET", tls=self.tls, hosts=self.hosts)
        status, body, retry_after = request._request(call)  # noqa: SLF001  of this module
        if 200 <= status < 300:
            return Done(body) if self.found(body) else None
        if status in {404, 410}:
            return None
        failure = _failure(status, body, retry_after)
        raise TryLater(str(failure), retry_after) if isinstance(failure, Refused) else failure


def _require_hosts(url: str | Callable[[Call], str], hosts: Collection[str]) -> None:
    """Check that a fixed address is valid, and that a function's hosts are named. Raises JobError."""
    if isinstance(url, str):
        _target(url)
    if isinstance(hosts, str) or (callable(url) and not hosts):
        raise JobError(
            "hosts: must be a list of the hosts that the url's function may lead to, as in ['api.example.com']"
        )
    for host in hosts:
        if not _is_host(host):
            raise JobError(f"hosts: {host!r} must be a host, or host:port")


def _is_host(host: str) -> bool:
    try:
        parts = urlsplit(f"//{host}")
        return parts.netloc == host and bool(parts.hostname) and "@" not in host and (parts.port or 1) > 0
    except ValueError:
        return False


def _allowed(url: str, hosts: Collection[str]) -> SplitResult:
    """Return the request's target. Raises JobError for a host that is not among those named."""
    target = _target(url)
    port = _port(target)
    for host in hosts:
        named = urlsplit(f"//{host}")
        if named.hostname == target.hostname and named.port in {None, port}:
            return target
    raise JobError(f"url: {target.hostname}:{port} is not among its hosts: {', '.join(sorted(hosts))}")


def _require_verifying(tls: ssl.SSLContext | None) -> None:
    if tls is not None and (tls.verify_mode is not ssl.CERT_REQUIRED or not tls.check_hostname):
        raise JobError(
            "tls: the context must verify the provider's certificate and host name; for an authority of your own use "
            "ssl.create_default_context(cafile=…)"
        )


def _target(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        # Reading the port checks it.
        usable = parts.scheme in {"http", "https"} and parts.hostname and "@" not in parts.netloc and parts.port != 0
    except ValueError as error:
        raise JobError(f"url: {error}") from error
    if not usable:
        raise JobError("url: must be http:// or https:// with a host, and credentials belong into headers")
    return parts


def _port(target: SplitResult) -> int:
    return target.port or _PORTS[target.scheme]


def _merged(*parts: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of all parts, each name once, as in the last part that has it: their case does not matter."""
    found = {name.lower(): (name, value) for part in parts for name, value in part.items()}
    return dict(found.values())


class _LastResponse(http.client.HTTPResponse):
    """Passes over 102 and 103, which precede the answer. The base class does so only with 100."""

    def begin(self) -> None:
        super().begin()
        while self.status < 200 and self.status != http.HTTPStatus.SWITCHING_PROTOCOLS:
            # Else it takes the answer for read.
            self.headers = self.msg = None  # type: ignore[assignment]
            super().begin()


def _prepared(
    target: SplitResult, tls: ssl.SSLContext | None, method: str, headers: Mapping[str, str], content: bytes | None
) -> http.client.HTTPConnection:
    """Return what has the head of a request and is not connected. Raises errors for what HTTP does not allow."""
    # Always with a port: without one, http.client takes the end of an IPv6 address for it.
    host, port = target.hostname or "", _port(target)
    connection = (
        http.client.HTTPConnection(host, port) if tls is None else http.client.HTTPSConnection(host, port, context=tls)
    )
    connection.response_class = _LastResponse
    given = {name.lower() for name in headers}
    connection.putrequest(
        method,
        (target.path or "/") + (f"?{target.query}" if target.query else ""),
        skip_host="host" in given,
        skip_accept_encoding="accept-encoding" in given,
    )
    if (content is not None or method in {"PATCH", "POST", "PUT"}) and not given & {
        "content-length",
        "transfer-encoding",
    }:
        connection.putheader("Content-Length", str(len(content or b"")))
    for name, value in headers.items():
        connection.putheader(name, value)
    return connection


def _connected(host: str, port: int, deadline: float) -> socket.socket:
    """Connect to the first of a host's addresses that answers; each gets its share of the time.

    Raises the first address's OSError if none answers.
    """
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    first: OSError | None = None
    for left, (family, kind, protocol, _, address) in zip(range(len(addresses), 0, -1), addresses, strict=True):
        try:
            # Fails for a family that the kernel lacks.
            sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(_left(deadline) / left)
                sock.connect(address)
                sock.settimeout(_left(deadline))
                # Head and body are sent one after the other; the second would wait for the first to be acknowledged.
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError:
                sock.close()
                raise
        except OSError as error:
            first = first or error
        else:
            return sock
    raise first or OSError(f"{host} has no address")


def _left(deadline: float) -> float:
    """Return the seconds until a deadline. Raises TimeoutError when it is over: nothing may be sent then."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("the call's time is over")
    return seconds


@contextmanager
def _ended_at(sock: socket.socket, deadline: float) -> Iterator[threading.Event]:
    """End the connection at the deadline: a socket's own timeout starts over with every byte that comes."""
    ended = threading.Event()

    def end() -> None:
        ended.set()
        # The connection may have ended already.
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(deadline - time.monotonic(), end)
    timer.daemon = True
    timer.start()
    try:
        yield ended
    finally:
        timer.cancel()


def _failure(status: int, body: Any, retry_after: float | None) -> Refused | TryLater | OutcomeUnknown:
    text = f"HTTP {status}: {json.dumps(body, ensure_ascii=False, default=str)[:500]}"
    if status >= 500 or status < 200 or status in _UNKNOWN:
        return OutcomeUnknown(text, retry_after)
    if status < 400 or status in _NOTHING_HAPPENED:
        return TryLater(text, retry_after)
    return Refused(text)


def _json(read: bytes) -> Any:
    if not read:
        return None
    try:
        found = exact_json.loads(read)
    except (ValueError, RecursionError):
        found = None
    else:
        if not exact_json.is_deep(found):
            return found
    return {"text": read.decode("utf-8", "replace")}


def _retry_after(headers: email.message.Message) -> float | None:
    """Return the header's seconds, or the seconds until its date by the server's clock; None if it is invalid."""
    value = (headers.get("Retry-After") or "").strip()
    if value.isdecimal():
        return float(value)
    try:
        then = email.utils.parsedate_to_datetime(value).timestamp()
        now = email.utils.parsedate_to_datetime(headers["Date"]).timestamp() if headers.get("Date") else time.time()
    except (ValueError, TypeError, ArithmeticError):
        return None
    return max(0.0, then - now)
