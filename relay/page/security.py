"""Who may see the page and who may act on it, and the checks that every request has to pass.

A request has to name a host that the page answers for, or a site that resolves its own name to our address could read
the page through an operator's browser (DNS rebinding). Then it has to come from a known user:

| set-up                                   | who the user is                                                        |
|------------------------------------------|------------------------------------------------------------------------|
| a loopback address (default)             | who has the link that is printed at the start: its token becomes a     |
|                                          | cookie for a path that is drawn at random, see below                   |
| a proxy that shares a secret with us     | whom the proxy names in a header, next to the secret in another        |
| a host application mounts the page       | the user that the host names                                           |

Other users of the machine can reach a loopback port, and can serve sites at other ports. A cookie is sent to all ports
of its host, and SameSite and HttpOnly do not keep ports apart either: any of those sites would get a cookie of the
host. So the page lies below a path that they do not know, and the cookie is sent only with requests below it. The path
alone gives no access, and no other site gets it in a Referer.

An action is a POST by an admin, with our form's token and from our own origin: a form on another site can't send it.

Below ``/api`` each request carries the token itself (``Authorization: Bearer``), and the cookie counts for nothing.
Where a proxy or a host knows its users, a browser may send their requests unasked: so an action has to be JSON, which
another site's page can't send without asking first, and that is refused.
"""

from __future__ import annotations

import hmac
import inspect
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from outbox.errors import ConfigurationError
from relay.page import api

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_COOKIE: Final = "outbox_page"
SECRET_HEADER: Final = "X-Outbox-Proxy-Secret"  # noqa: S105
"""Where a proxy shows the secret that it shares with the page."""
_ENTER: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>outbox</title><link rel="icon" href="{0}static/icon.svg">
<meta http-equiv="refresh" content="0;url={0}"></head><body><p><a href="{0}">The operations page</a></p></body></html>
"""
_ONCE_SECONDS: Final = 60
"""A browser may have to be started first."""
_JSON: Final = "application/json"
_MAX_BODY: Final = 256 << 10
_MAX_FIELDS: Final = 5_000

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


class Role(StrEnum):
    """What a user of the page may do."""

    READ_ONLY = "read-only"
    """See everything that the page shows."""
    ADMIN = "admin"
    """Also retry, discard, pause and resume."""


@dataclass(frozen=True, slots=True)
class User:
    """A user of the page. ``name`` is written into the audit with each action."""

    name: str
    role: Role


class _NameUnreadable(Exception):
    """The proxy's header with the user's name is not UTF-8."""


Authenticate = Callable[[Request], "User | Awaitable[User | None] | None"]
"""How a host application says who sends a request; None: a user who may not see the page."""


def from_proxy(secret: str, user_header: str) -> Authenticate:
    """Return the function that knows a user by a proxy's headers: the shared secret, and the user's name in another.

    Every user that the proxy lets in is an admin. None unless each of the headers is there exactly once: a proxy that
    adds its own to what the client has sent proves nothing. The name is UTF-8. One that is not is refused, as two users
    may become one if its bytes are replaced.
    """

    def authenticate(request: Request) -> User | None:
        shown, names = request.headers.getlist(SECRET_HEADER), request.headers.getlist(user_header)
        if len(shown) != 1 or not hmac.compare_digest(shown[0].encode(), secret.encode()):
            return None
        if len(names) != 1 or not names[0]:
            return None
        try:
            # Starlette decodes headers as Latin-1.
            return User(names[0].encode("latin-1").decode(), Role.ADMIN)
        except UnicodeDecodeError:
            raise _NameUnreadable(user_header) from None

    return authenticate


@dataclass(slots=True)
class Access:
    """How the page knows its users: a token or ``authenticate``.

    token          a secret: a user who opens ``/?token=…`` is an admin. So is whoever first uses a ``one_time_token``.
    authenticate   a function of the host application, or ``from_proxy``.
    read_only      no user is an admin.
    secret         signs the forms; a host application with several processes gives all of them the same.
    """

    token: str | None = field(default=None, repr=False)
    authenticate: Authenticate | None = None
    read_only: bool = False
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    _once: tuple[str, float] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if bool(self.token) == bool(self.authenticate):
            raise ConfigurationError("the page needs exactly one way to know its users: a token, or a host's function")

    def limited(self, user: User) -> User:
        return User(user.name, Role.READ_ONLY) if self.read_only else user

    def one_time_token(self) -> str:
        """Return a token that is taken once, within seconds: for a link that a browser keeps in its history."""
        token = secrets.token_urlsafe(24)
        self._once = token, time.monotonic() + _ONCE_SECONDS
        return token

    def takes(self, shown: str) -> bool:
        """Return whether a token is valid. One that was for one time is not any more."""
        if self.token is None:
            return False
        once = self._once
        if once is not None and hmac.compare_digest(shown.encode(), once[0].encode()):
            self._once = None
            return time.monotonic() < once[1]
        return hmac.compare_digest(shown.encode(), self.token.encode())

    def by_cookie(self, cookie: str | None) -> User | None:
        """Return the user of a cookie that the token was exchanged for, or None."""
        return None if cookie is None else self._local(cookie, self.cookie)

    def by_header(self, authorization: str) -> User | None:
        """Return the user of a program that sends the token with each request, or None."""
        kind, _, shown = authorization.partition(" ")
        return self._local(shown.strip(), self.token) if kind.lower() == "bearer" else None

    def _local(self, shown: str, wanted: str | None) -> User | None:
        if self.token is None or wanted is None or not hmac.compare_digest(shown.encode(), wanted.encode()):
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
        return hmac.digest(self.secret, f"form\0{user.name}".encode(), "sha256").hex()


class Guard:
    """ASGI middleware: the checks above, and the headers of every answer.

    origins  the page answers for their hosts, and takes forms from them; empty: it answers for any host, because a host
             application has checked it, and takes forms from the origin of the request itself.
    broken   makes the answer to a request that failed by a mistake of ours.
    """

    def __init__(
        self, app: ASGIApp, access: Access, origins: Collection[str], broken: Callable[[Request, Exception], Response]
    ) -> None:
        self._app = app
        self._broken = broken
        self._access = access
        self._origins = frozenset(origin.lower() for origin in origins)
        self._hosts = frozenset(urlsplit(origin).netloc for origin in self._origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
        path = request.url.path.removeprefix(scope.get("root_path", ""))
        scope["outbox.api"] = path.startswith(f"{api.PREFIX}/")
        refusal = self._refusal(request)
        if refusal is None:
            try:
                refusal = await self._known(request)
            except ClientDisconnect:
                # Before its form was complete. No answer would arrive.
                return
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
        if "\0" in request.url.path or _has_nul(request.query_params.multi_items()):
            return _without_nul()
        host = request.headers.get("host", "").lower()
        if self._hosts and host not in self._hosts:
            return PlainTextResponse(
                "This page does not answer for the host that was asked for. Use the address that `outbox web` prints, "
                "or that of the proxy in OUTBOX_WEB__ORIGIN, which has to pass on the header Host.\n",
                421,
            )
        return None

    async def _known(self, request: Request) -> Response | None:
        """Find the request's user, and the fields of a form. Returns the answer to one that may not pass."""
        shown = request.query_params.get("token")
        if self._access.token is not None and shown is not None and request.method == "GET":
            return self._exchange(request, shown)
        try:
            user = await self._user(request)
        except _NameUnreadable as error:
            return PlainTextResponse(f"the proxy names the user in {error}, which is not UTF-8\n", 400)
        if user is None:
            return self._ask(request)
        request.scope["outbox.user"] = user
        request.scope["outbox.form_token"] = self._access.form_token(user)
        request.scope["outbox.access"] = self._access
        if request.method != "POST":
            return None
        body = await _body(request)
        if body is None:
            return PlainTextResponse("the form is too large\n", 413)
        return self._refused_action(request, user, body)

    async def _user(self, request: Request) -> User | None:
        access = self._access
        if access.authenticate is not None:
            found = access.authenticate(request)
            user = await found if inspect.isawaitable(found) else found
            return None if user is None else access.limited(user)
        if request.scope["outbox.api"]:
            return access.by_header(request.headers.get("authorization", ""))
        return access.by_cookie(request.cookies.get(_COOKIE))

    def _exchange(self, request: Request, shown: str) -> Response:
        if not self._access.takes(shown):
            return self._ask(request)
        # A page that leads on, and no redirect: with one, a browser that follows a link from another site (a chat, a
        # terminal in a browser) would not send the cookie along.
        answer = HTMLResponse(_ENTER.format(f"{request.scope.get('root_path', '')}/"))
        answer.set_cookie(
            _COOKIE,
            self._access.cookie,
            path=f"{request.scope.get('root_path', '')}/",
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return answer

    def _ask(self, request: Request) -> Response:
        if self._access.token is not None and request.scope["outbox.api"]:
            text = "send the token of the link that `outbox web` printed, as Authorization: Bearer …\n"
            return PlainTextResponse(text, 401, {"WWW-Authenticate": "Bearer"})
        if self._access.token is not None:
            return ask_for_link()
        return PlainTextResponse("you may not see this page: sign in where it is linked from\n", 403)

    def _refused_action(self, request: Request, user: User, body: bytes) -> Response | None:
        origin = request.headers.get("origin", "").lower()
        site = request.headers.get("sec-fetch-site")
        ours = self._origins or {f"{request.url.scheme}://{request.headers.get('host', '')}".lower()}
        api_call = request.scope["outbox.api"]
        # Programs send no origin.
        if origin not in (ours | {""} if api_call else ours) or site not in {None, "same-origin"}:
            return PlainTextResponse("the action was sent from another site\n", 403)
        if api_call and request.headers.get("content-type", "").partition(";")[0].strip().lower() != _JSON:
            return PlainTextResponse(f"send the fields as {_JSON}\n", 415)
        fields = api.fields_of(body) if api_call else fields_of(body)
        if fields is None:
            if api_call:
                return PlainTextResponse("send one JSON object: names with texts, numbers, or lists of these\n", 400)
            return PlainTextResponse("the form can't be read\n", 400)
        if _has_nul(fields):
            return _without_nul()
        request.scope["outbox.fields"] = fields
        wanted: str = request.scope["outbox.form_token"]
        if not api_call and not hmac.compare_digest(dict(fields).get("form_token", "").encode(), wanted.encode()):
            return PlainTextResponse("the form has expired: open the page again\n", 403)
        if user.role is not Role.ADMIN:
            return PlainTextResponse("this needs the role admin; yours is read-only\n", 403)
        return None


def ask_for_link() -> Response:
    return PlainTextResponse("open the link that `outbox web` printed: it has a token in it\n", 403)


def _add_headers(message: Message, *, secure: bool) -> None:
    headers = MutableHeaders(scope=message)
    for name, value in _HEADERS.items():
        headers.setdefault(name, value)
    if secure:
        headers.setdefault("Strict-Transport-Security", "max-age=31536000")


def fields_of(body: bytes) -> list[tuple[str, str]] | None:
    """Return the fields of a form that was sent as application/x-www-form-urlencoded; None if it can't be read."""
    try:
        return parse_qsl(body.decode(), keep_blank_values=True, errors="strict", max_num_fields=_MAX_FIELDS)
    except ValueError:
        return None


def _has_nul(fields: Sequence[tuple[str, str]]) -> bool:
    """Return whether a field has a NUL character, which Postgres has in no text."""
    return any("\0" in text for pair in fields for text in pair)


def _without_nul() -> Response:
    return PlainTextResponse("the request has a NUL character in it\n", 400)


async def _body(request: Request) -> bytes | None:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > _MAX_BODY:
            return None
        parts.append(part)
    return b"".join(parts)
