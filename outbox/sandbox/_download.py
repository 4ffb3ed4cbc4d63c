"""Downloads that resume after a lost connection or a killed process, and their progress display."""

from __future__ import annotations

import contextlib
import http.client
import re
import ssl
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Final

import stamina

from outbox.sandbox.errors import ServiceError

_CHUNK: Final = 1 << 16
_TIMEOUT: Final = 30.0
_ATTEMPTS: Final = 6
_CLIENT_ERRORS_WORTH_A_RETRY: Final = {408, 425, 429}


class _CutShort(Exception):
    """The response ended before the whole file was received."""


def resume(url: str, part: Path, size: int, report: Callable[[int], None]) -> None:
    """Download ``url`` into ``part``, appending to what it already holds, until it has ``size`` bytes.

    report   called with the number of bytes downloaded so far.

    Timeouts, lost connections and server errors are retried with growing pauses. Raises ServiceError after the last
    try, and at once if the server does not have the file.
    """
    if part.exists() and part.stat().st_size > size:
        part.unlink()
    try:
        for attempt in stamina.retry_context(
            on=_worth_a_retry, attempts=_ATTEMPTS, timeout=None, wait_initial=0.2, wait_max=10.0
        ):
            with attempt:
                _one_try(url, part, size, report)
    except urllib.error.HTTPError as error:
        raise ServiceError(
            f"{url}: the repository answers {error.code} {error.reason}. Set OUTBOX_MAVEN_REPOSITORY to a Maven "
            "repository that has it"
        ) from error
    except (OSError, http.client.HTTPException, _CutShort) as error:
        raise ServiceError(
            f"{url}: {str(error) or type(error).__name__}, after {_ATTEMPTS} tries. Check the network and proxy "
            "settings, or set OUTBOX_MAVEN_REPOSITORY to a Maven repository that can be reached; "
            "what was downloaded is kept"
        ) from error


def _worth_a_retry(error: Exception) -> bool:
    if isinstance(error, urllib.error.HTTPError):
        return error.code >= 500 or error.code in _CLIENT_ERRORS_WORTH_A_RETRY
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, ssl.SSLCertVerificationError):
        return False
    return isinstance(error, (OSError, http.client.HTTPException, _CutShort))


def _one_try(url: str, part: Path, size: int, report: Callable[[int], None]) -> None:
    have = part.stat().st_size if part.exists() else 0
    report(have)
    if have == size:
        return
    if not url.startswith(("http://", "https://")):
        raise ServiceError(f"{url}: a Maven repository's address starts with https:// or http://")
    headers = {"User-Agent": "outbox-kafka", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - http or https, see above
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT, context=_trust())  # noqa: S310
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            part.unlink()
            raise _CutShort("the repository's file is shorter than what was downloaded of it") from None
        raise
    with response, part.open("ab") as file:
        if have and not _continues(response, have):
            file.truncate(0)  # the server sends the whole file
            have = 0
        while have < size:
            chunk = response.read(min(_CHUNK, size - have))
            if not chunk:
                raise _CutShort(f"the connection ended at byte {have:,} of {size:,}")
            try:
                file.write(chunk)
                file.flush()
            except OSError as error:
                # A local error: another try would not help.
                raise ServiceError(f"{part} can't be written: {error}. Make room, or set OUTBOX_CACHE") from error
            have += len(chunk)
            report(have)


def _continues(response: http.client.HTTPResponse, offset: int) -> bool:
    found = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    return response.status == http.HTTPStatus.PARTIAL_CONTENT and found is not None and int(found[1]) == offset


@cache
def _trust() -> ssl.SSLContext:
    """Return a context that trusts the system's certificates ($SSL_CERT_FILE), and certifi's if it is installed."""
    context = ssl.create_default_context()
    try:
        import certifi
    except ImportError:
        return context
    context.load_verify_locations(certifi.where())
    return context


@contextlib.contextmanager
def display(what: str, count: int, size: int) -> Iterator[Callable[[str, int, int], None]]:
    """Show the progress of ``count`` files, ``size`` bytes in total, on standard error. Yields the report callback."""
    title = f"Downloading {what} ({count} {'file' if count == 1 else 'files'}, {size / 1e6:,.0f} MB)"
    if not sys.stderr.isatty():
        print(f"{title} …", file=sys.stderr, flush=True)
        began = time.monotonic()
        yield lambda *_: None
        print(f"{title}: done in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        return

    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=size)
        here: dict[str, int] = {}
        guard = threading.Lock()

        def report(name: str, done: int, _: int) -> None:
            with guard:
                here[name] = done
                bar.update(task, completed=sum(here.values()))

        yield report
