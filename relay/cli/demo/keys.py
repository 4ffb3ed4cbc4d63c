"""Keys of the terminal that act on the demo while its panel is shown."""

from __future__ import annotations

import os
import select
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from outbox.errors import OutboxError


@contextmanager
def listening(actions: Mapping[str, Callable[[], object]], say: Callable[[str], None]) -> Iterator[bool]:
    """Call the action of each key that is pressed, from a thread of its own. Errors of an action are said.

    Yields whether there are keys to press: not without a terminal, nor in the background of one.
    """
    if not _in_foreground():
        yield False
        return
    terminal = sys.stdin.fileno()
    woken, wake = os.pipe()

    def listen() -> None:
        while woken not in (ready := select.select([terminal, woken], [], [])[0]):
            pressed = os.read(terminal, 64).decode(errors="replace") if ready else ""
            if not pressed:
                return
            for key in pressed:
                try:
                    actions.get(key, lambda: None)()
                except OutboxError as error:
                    say(str(error))

    thread = threading.Thread(target=listen, name="demo-keys")
    before = termios.tcgetattr(terminal)
    # Each key at once and without an echo; Ctrl-C stays a signal.
    tty.setcbreak(terminal)
    try:
        thread.start()
        yield True
    finally:
        os.write(wake, b"\0")
        thread.join()
        os.close(woken)
        os.close(wake)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _in_foreground() -> bool:
    try:
        return sys.stdin.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except OSError:
        # A terminal, but not the one that controls this process.
        return False
