"""Named places where tests make a relay fail: ``OUTBOX_FAILPOINTS="txn.committed=kill@3 batch.fetched=delay:1"``.

Turned on by the variable at the start of the process. When off, each step of a batch costs one check of an empty dict.

| action    | what happens there                                     |
|-----------|--------------------------------------------------------|
| kill      | SIGKILL to this process                                |
| pause     | SIGSTOP to this process, until a SIGCONT               |
| error     | Unavailable is raised, as if a server had gone away    |
| delay:S   | S seconds pass                                         |

``@n`` acts the n-th time that the place is reached (by default the first), and ``@n+`` from then on.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from dataclasses import dataclass
from typing import Final

import structlog

from outbox.errors import ConfigurationError
from relay.core.ports import Unavailable

log = structlog.get_logger("relay")

VARIABLE: Final = "OUTBOX_FAILPOINTS"

_FORM: Final = re.compile(
    r"(?P<name>[a-z_.]+)=(?P<action>kill|pause|error|delay:(?P<seconds>[0-9.]+))(@(?P<nth>\d+)(?P<on>\+)?)?"
)


@dataclass(slots=True)
class _Action:
    action: str
    seconds: float
    nth: int
    onwards: bool
    reached: int = 0


_armed: dict[str, _Action] = {}
_lock = threading.Lock()


def arm(text: str) -> None:
    """Turn on failpoints. Raises ConfigurationError for an unknown action."""
    for part in text.split():
        match = _FORM.fullmatch(part)
        if match is None:
            raise ConfigurationError(f"{VARIABLE}: {part!r} is not NAME=kill|pause|error|delay:S[@n[+]]")
        _armed[match["name"]] = _Action(
            match["action"].partition(":")[0], float(match["seconds"] or 0), int(match["nth"] or 1), bool(match["on"])
        )


def arm_from_environment() -> bool:
    """Turn on the failpoints in the environment variable. Returns whether there are any."""
    text = os.environ.get(VARIABLE, "")
    arm(text)
    return bool(text)


def failpoint(name: str) -> None:
    """Mark a place. Raises Unavailable when armed with ``error``."""
    if _armed:
        _reach(name)


def _reach(name: str) -> None:
    action = _armed.get(name)
    if action is None:
        return
    with _lock:
        action.reached += 1
        due = action.reached == action.nth or (action.onwards and action.reached > action.nth)
    if not due:
        return
    match action.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "pause":
            # Sent to the process, it could reach another thread, and this one would go on until that one is scheduled.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        case "delay":
            time.sleep(action.seconds)
        case _:
            # The loop may log another error of the same turn instead.
            log.warning("failpoint reached", failpoint=name)
            raise Unavailable(f"failpoint {name}")
