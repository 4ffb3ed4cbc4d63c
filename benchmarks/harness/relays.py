"""Our relay as a publisher: the process, its settings, and nothing of its inside."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from benchmarks.harness.publishers import Publisher, Way
from benchmarks.harness.servers import BenchError, Servers, Site, wait_until
from outbox.testing.fixtures import RelayProcess

_READY_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 60.0


class Relay(Publisher):
    """``outbox relay run`` as a process."""

    def __init__(
        self, servers: Servers, site: Site, source: str, delivery: str, settings: Mapping[str, object]
    ) -> None:
        super().__init__(servers, site)
        self._source = source
        self._settings = {"source": source, "delivery": delivery, "log_format": "json", **settings}
        self._process: RelayProcess | None = None
        if source == "wal":
            site.outbox("cdc", "setup")
            site.outbox("relay", "switch", "wal")

    @property
    def process(self) -> RelayProcess:
        """The process. Raises BenchError before the first start."""
        if self._process is None:
            raise BenchError("the relay was not started")
        return self._process

    @property
    def pids(self) -> list[int]:
        return [self.process.pid]

    def start(self) -> None:
        number = len(list(self.site.folder.glob("relay-*.log"))) + 1
        self._process = RelayProcess(
            [sys.executable, "-m", "relay.cli", "relay", "run", *self.servers.arguments],
            self.site.environment(**self._settings),
            self.site.folder / f"relay-{number}.log",
        )
        ready = "owner IS NOT NULL AND lease_until > now()" + (" AND streaming" if self._source == "wal" else "")
        with self.site.connect() as connection:
            query = f"SELECT bool_and({ready}) FROM outbox.lanes".encode()

            def holds_all_lanes() -> bool:
                self.check()
                return connection.execute(query).fetchone() == (True,)

            wait_until(holds_all_lanes, "the relay to have all lanes", _READY_SECONDS, every=0.05)

    def check(self) -> None:
        if not self.process.running:
            raise BenchError("the relay ended by itself")

    def halt(self) -> None:
        self.process.terminate()
        try:
            status = self.process.wait(_STOP_SECONDS)
        except AssertionError as error:
            raise BenchError(str(error)) from error
        if status:
            raise BenchError(f"the relay ended with exit status {status}")

    def kill(self) -> None:
        if self._process is not None and self._process.running:
            self._process.kill()

    def explain(self) -> str:
        return self._process.log()[-3000:] if self._process is not None else ""


@dataclass(frozen=True)
class Ours(Way):
    """Our relay."""

    source: str
    delivery: str
    settings: tuple[tuple[str, object], ...] = ()

    def open(self, servers: Servers, site: Site) -> Relay:
        return Relay(servers, site, self.source, self.delivery, dict(self.settings))


def ours(source: str, delivery: str, **settings: object) -> Ours:
    """Return our relay with this source and delivery."""
    return Ours(f"ours, {source}, {delivery}", source, delivery, tuple(settings.items()))
