"""The operations page of a demo: the same one as `outbox web`, with buttons that break something."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from outbox.errors import NotFound
from relay.cli.demo.controls import Controls
from relay.cli.demo.ledger import Sight

if TYPE_CHECKING:
    from relay.config import Settings

_START_SECONDS: Final = 30.0


class PageControls:
    """What the page offers to be done to the demo. ``sight`` returns the newest figures."""

    def __init__(self, controls: Controls, sight: Callable[[], Sight | None]) -> None:
        self._controls = controls
        self._sight = sight
        self._known: Mapping[str, tuple[str, Callable[[], str]]] = {
            "kill-relay": ("Kill the relay", controls.kill_relay),
            "kill-consumer": ("Kill the consumer", controls.kill_consumer),
            "stop-broker": ("Stop the broker", controls.stop_broker),
            "start-broker": ("Start the broker", controls.start_broker),
            "repeat": ("Repeat a delivery", controls.repeat_delivery),
        }

    def actions(self) -> Sequence[tuple[str, str]]:
        """Return the name and the label of each action."""
        return [(name, label) for name, (label, _) in self._known.items()]

    def run(self, name: str) -> str:
        """Do it. Returns what was done. Raises NotFound for a name that is no action's."""
        if name not in self._known:
            raise NotFound(f"the demo has no action {name!r}")
        return self._known[name][1]()

    def states(self) -> Mapping[str, str]:
        """Return the comparison of shop and sink so far, and what each process does."""
        found = {}
        if (sight := self._sight()) is not None:
            found = {
                "lost": f"{sight.lost:,}",
                "applied twice": f"{sight.applied_twice:,}",
                "out of order": f"{sight.out_of_order:,}",
                "repeats dropped": f"{sight.duplicates:,}",
            }
        return found | {name: str(standing) for name, standing in self._controls.states().items()}


def page_settings(environment: Mapping[str, str], address: str) -> Settings:
    """Return the page's settings for a demo whose processes have this environment. Payloads are its own: shown."""
    from relay.config import load

    return load(
        database_url=environment["OUTBOX_DATABASE_URL"],
        kafka={"bootstrap.servers": environment["OUTBOX_KAFKA__BOOTSTRAP_SERVERS"]},
        topic_template=environment["OUTBOX_TOPIC_TEMPLATE"],
        consumer_schema=environment["OUTBOX_CONSUMER_SCHEMA"],
        web={"address": address, "payloads": "shown", "refresh_seconds": 1.0},
    )


@contextmanager
def open_page(settings: Settings, controls: PageControls) -> Iterator[str]:
    """Serve the page in a thread, and yield its link. Raises ConfigurationError when it can't listen."""
    from relay.page.server import PageServer

    server = PageServer(settings, controls=controls)
    ready = threading.Event()
    thread = threading.Thread(target=server.run, args=(ready.set,), name="demo page", daemon=True)
    thread.start()
    try:
        ready.wait(_START_SECONDS)
        yield server.link
    finally:
        server.stop()
        thread.join()
