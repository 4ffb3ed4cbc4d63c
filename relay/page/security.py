"""Who may see the page and who may act on it, and the checks that every request has to pass.

A request has to name a host that the page answers for, or a site that resolves its own name to our address could read
the page through an operator's browser (DNS rebinding). Then it has to come from somebody we know:

| set-up                                   | who somebody is                                                        |
|------------------------------------------|------------------------------------------------------------------------|
| a loopback address, no users (default)   | who has the link that is printed at the start: its token becomes a     |
|                                          | cookie, as other users of the machine can reach the port too           |
| users                                    | HTTP Basic (RFC 7617), over TLS only; passwords are kept as scrypt     |
|                                          | hashes (RFC 7914)                                                      |
| a host application mounts the page       | whoever the host says                                                  |

An action is a POST by an admin, with our form's token and from our own origin: a form on another site can't send it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import inspect
import secrets
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from outbox.errors import ConfigurationError
from relay.config import Role

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_COOKIE: Final = "outbox_page"
_GUESSES: Final = 4
"""Passwords that are tried at the same time; a further one is refused at once."""
_ENTER: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>outbox</title><link rel="icon" href="{0}static/icon.svg">
<meta http-equiv="refresh" content="0;url={0}"></head><body><p><a href="{0}">The operations page</a></p></body></html>
"""
_MAX_BODY: Final = 256 << 10
_MAX_FIELDS: Final = 5_000
# RFC 7914: about 50 ms and 16 MiB for each password that is tried.
_SCRYPT: Final = {"n": 1 << 14, "r": 8, "p": 1}
_HASH_PREFIX: Final = "scrypt"

_POLICY: Final = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # Not no-referrer: browsers would send `Origin: null` with our own forms.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True, slots=True)
class User:
    """Somebody who uses the page. ``name`` is written into the audit with each action."""

    name: str
    role: Role


Authenticate = Callable[[Request], "User | Awaitable[User | None] | None"]
"""How a host application says who sends a request; None: nobody who may see the page."""


@dataclass(frozen=True, slots=True)
class Account:
    """A user with a password. ``password_hash`` is what ``hash_password`` returns."""

    password_hash: str
    role: Role = Role.READ_ONLY

    def __post_init__(self) -> None:
        _parts(self.password_hash)


@dataclass(slots=True)
class Access:
    """How the page knows its users; exactly one of the three.

    accounts       by name.
    token          a secret: whoever opens ``/?token=…`` is an admin.
    authenticate   a function of the host application.
    read_only      nobody is an admin.
    secret         signs the forms; a host application with several processes gives all of them the same.
    """

    accounts: Mapping[str, Account] = field(default_factory=dict)
    token: str | None = None
    authenticate: Authenticate | None = None
    read_only: bool = False
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    _known: dict[tuple[str, bytes], Account] = field(default_factory=dict, repr=False)
    # One at a time: passwords that are guessed may not take all of the processor and memory.
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _guesses: threading.BoundedSemaphore = field(
        default_factory=lambda: threading.BoundedSemaphore(_GUESSES), repr=False
    )

    def __post_init__(self) -> None:
        if sum(map(bool, (self.accounts, self.token, self.authenticate))) != 1:
            raise ConfigurationError("the page needs exactly one way to know its users: accounts, a token, or a host's")

    def limited(self, user: User) -> User:
        """Return the user with the rights that the page gives."""
        return User(user.name, Role.READ_ONLY) if self.read_only else user

    def by_known_password(self, name: str, password: str) -> User | None:
        """Return the user of a name and password that were right before, without the cost of a hash; or None."""
        account = self._known.get((name, self._digest(name, password)))
        return None if account is None else self.limited(User(name, account.role))

    def by_password(self, name: str, password: str) -> User | None:
        """Return the user of this name and password, or None. Raises Busy while too many others are tried."""
        if not self._guesses.acquire(blocking=False):
            raise Busy
        try:
            with self._lock:
                account = self.accounts.get(name)
                # As long for a name that is unknown: the time must not tell which there are.
                matches = verify_password(password, _NOBODY if account is None else account.password_hash)
        finally:
            self._guesses.release()
        if account is None or not matches:
            return None
        self._known[name, self._digest(name, password)] = account
        return self.limited(User(name, account.role))

    def _digest(self, name: str, password: str) -> bytes:
        return hmac.digest(self.secret, f"{name}\0{password}".encode(), "sha256")

    def by_cookie(self, cookie: str | None) -> User | None:
        """Return the user of a cookie that the token was exchanged for, or None."""
        if self.token is None or cookie is None or not hmac.compare_digest(cookie.encode(), self.cookie.encode()):
            return None
        return self.limited(User("local", Role.ADMIN))

    @property
    def cookie(self) -> str:
        """Return the cookie for who has shown the token. It is not the token, so that a restart ends it."""
        return hmac.digest(self.secret, (self.token or "").encode(), "sha256").hex()

    def sign(self, text: str) -> str:
        """Return a signature, so that a text that comes back is known to be ours."""
        return hmac.digest(self.secret, f"note\0{text}".encode(), "sha256").hex()

    def form_token(self, user: User) -> str:
        """Return the token that a user's forms carry."""
        return hmac.digest(self.secret, f"form\0{user.name}".encode(), "sha256").hex()


class Busy(Exception):
    """Too many passwords are tried at the same time."""


def hash_password(password: str) -> str:
    """Return a password's hash, with a salt, for the settings."""
    salt = secrets.token_bytes(16)
    return f"{_HASH_PREFIX}${base64.b64encode(salt).decode()}${base64.b64encode(_scrypt(password, salt)).decode()}"


def verify_password(password: str, password_hash: str) -> bool:
    """Return whether a password has this hash. Raises ConfigurationError for text that is no hash."""
    salt, wanted = _parts(password_hash)
    return hmac.compare_digest(_scrypt(password, salt), wanted)


def _scrypt(password: str, salt: bytes) -> bytes:
    return hashlib.scrypt(password.encode(), salt=salt, dklen=32, **_SCRYPT)


def _parts(password_hash: str) -> tuple[bytes, bytes]:
    prefix, _, rest = password_hash.partition("$")
    salt, _, digest = rest.partition("$")
    try:
        found = base64.b64decode(salt, validate=True), base64.b64decode(digest, validate=True)
    except (binascii.Error, ValueError):
        found = b"", b""
    if prefix != _HASH_PREFIX or len(found[0]) < 8 or len(found[1]) != 32:
        raise ConfigurationError("a password's hash must be one that `outbox web --hash-password` prints")
    return found


_NOBODY: Final = hash_password(secrets.token_hex(16))


class Guard:
    """ASGI middleware: the checks above, and the headers of every answer.

    hosts    the names, with ports where they are not the scheme's, that the page answers for; empty: any, because a
             host application has checked it.
    origins  the origins of our own forms; empty: that of the request itself.
    broken   makes the answer to a request that failed by a mistake of ours.
    """

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        hosts: Collection[str],
        origins: Collection[str],
        broken: Callable[[Request, Exception], Response],
    ) -> None:
        self._app = app
        self._broken = broken
        self._access = access
        self._hosts = frozenset(host.lower() for host in hosts)
        self._origins = frozenset(origin.lower() for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what may pass, and answer everything else."""
        if scope["type"] != "http":
            # The page has no WebSockets.
            await self._app(scope, receive, send)
            return

        started = False

        async def guarded(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                _add_headers(message, secure=scope["scheme"] == "https")
            await send(message)

        request = Request(scope, receive)
        refusal, body = self._refusal(request), None
        if refusal is None:
            refusal, body = await self._known(request)
        receive = receive if body is None else _again(body)
        if refusal is not None:
            await refusal(scope, receive, guarded)
            return
        try:
            await self._app(scope, receive, guarded)
        except Exception as error:
            if started:
                raise
            await self._broken(request, error)(scope, receive, guarded)

    def _refusal(self, request: Request) -> Response | None:
        if request.method not in {"GET", "HEAD", "POST"}:
            return PlainTextResponse("the page answers GET and POST\n", 405, {"Allow": "GET, HEAD, POST"})
        if "\0" in request.url.path or any(
            "\0" in text for pair in request.query_params.multi_items() for text in pair
        ):
            return _without_nul()
        host = request.headers.get("host", "").lower()
        if self._hosts and host not in self._hosts:
            return PlainTextResponse(
                "This page does not answer for the host that was asked for. Use the address that `outbox web` prints, "
                "or set OUTBOX_WEB__ORIGIN to the address that a proxy makes it known by.\n",
                421,
            )
        return None

    async def _known(self, request: Request) -> tuple[Response | None, bytes | None]:
        """Find the request's user. Returns the answer to one that may not pass, and the body if it was read."""
        shown = request.query_params.get("token")
        if self._access.token is not None and shown is not None and request.method == "GET":
            return self._exchange(request, shown), None
        try:
            user = await self._user(request)
        except Busy:
            text = "too many passwords are tried at the same time: try again\n"
            return PlainTextResponse(text, 429, {"Retry-After": "1"}), None
        if user is None:
            return self._ask(), None
        request.scope["outbox.user"] = user
        request.scope["outbox.form_token"] = self._access.form_token(user)
        request.scope["outbox.access"] = self._access
        if request.method != "POST":
            return None, None
        body = await _body(request)
        if body is None:
            return PlainTextResponse("the form is too large\n", 413), None
        return self._refused_action(request, user, body), body

    async def _user(self, request: Request) -> User | None:
        access = self._access
        if access.authenticate is not None:
            found = access.authenticate(request)
            user = await found if inspect.isawaitable(found) else found
            return None if user is None else access.limited(user)
        if access.token is not None:
            return access.by_cookie(request.cookies.get(_cookie_name(request)))
        credentials = _basic(request.headers)
        if credentials is None:
            return None
        known = access.by_known_password(*credentials)
        return known or await run_in_threadpool(access.by_password, *credentials)

    def _exchange(self, request: Request, shown: str) -> Response:
        assert self._access.token is not None
        if not hmac.compare_digest(shown.encode(), self._access.token.encode()):
            return self._ask()
        # A page that leads on, and no redirect: with one, a browser that follows a link from another site (a chat, a
        # terminal in a browser) would not send the cookie along.
        answer = HTMLResponse(_ENTER.format(f"{request.scope.get('root_path', '')}/"))
        answer.set_cookie(
            _cookie_name(request),
            self._access.cookie,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return answer

    def _ask(self) -> Response:
        if self._access.accounts:
            challenge = {"WWW-Authenticate": 'Basic realm="outbox", charset="UTF-8"'}
            return PlainTextResponse("name and password, please\n", 401, challenge)
        if self._access.token is not None:
            return PlainTextResponse("open the link that `outbox web` printed: it has a token in it\n", 403)
        return PlainTextResponse("you may not see this page\n", 403)

    def _refused_action(self, request: Request, user: User, body: bytes) -> Response | None:
        origin = request.headers.get("origin", "").lower()
        site = request.headers.get("sec-fetch-site")
        ours = self._origins or {f"{request.url.scheme}://{request.headers.get('host', '')}".lower()}
        if origin not in ours or site not in {None, "same-origin"}:
            return PlainTextResponse("the action was sent from another site\n", 403)
        fields = fields_of(body)
        if _has_nul(fields):
            return _without_nul()
        wanted: str = request.scope["outbox.form_token"]
        if not hmac.compare_digest(dict(fields).get("form_token", "").encode(), wanted.encode()):
            return PlainTextResponse("the form has expired: open the page again\n", 403)
        if user.role is not Role.ADMIN:
            return PlainTextResponse("this needs the role admin; yours is read-only\n", 403)
        return None


def _add_headers(message: Message, *, secure: bool) -> None:
    headers = MutableHeaders(scope=message)
    for name, value in _HEADERS.items():
        headers.setdefault(name, value)
    if secure:
        headers.setdefault("Strict-Transport-Security", "max-age=31536000")


def fields_of(body: bytes) -> list[tuple[str, str]]:
    """Return the fields of a form that was sent as application/x-www-form-urlencoded; none of anything else."""
    try:
        return parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=_MAX_FIELDS)
    except ValueError:
        return []


def _cookie_name(request: Request) -> str:
    """Return the cookie's name: one for each port, which cookies themselves do not tell apart."""
    return f"{_COOKIE}_{request.url.port or request.url.scheme}"


def _has_nul(fields: Sequence[tuple[str, str]]) -> bool:
    """Return whether a field has a NUL character, which Postgres has in no text."""
    return any("\0" in text for pair in fields for text in pair)


def _without_nul() -> Response:
    return PlainTextResponse("the request has a NUL character in it\n", 400)


def hosts_of(origins: Collection[str]) -> list[str]:
    """Return the values of ``Host`` that requests to these origins have."""
    return [urlsplit(origin).netloc for origin in origins]


def _basic(headers: Headers) -> tuple[str, str] | None:
    scheme, _, encoded = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        name, colon, password = base64.b64decode(encoded, validate=True).decode().partition(":")
    except (binascii.Error, ValueError):
        return None
    return (name, password) if colon else None


async def _body(request: Request) -> bytes | None:
    """Return the body of a form; None if it is too large."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > _MAX_BODY:
            return None
        parts.append(part)
    return b"".join(parts)


def _again(body: bytes) -> Receive:
    """Return a ``receive`` that has the body that was read."""
    sent = False

    async def receive() -> Message:
        nonlocal sent
        if sent:
            return {"type": "http.disconnect"}
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive
