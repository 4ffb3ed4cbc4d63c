"""Who publishes a site's events: what our relay, Debezium and the bare loop have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from benchmarks.harness.servers import BenchError, Servers, Site


class Publisher(ABC):
    """Publishes one site's events while it runs: started, halted while a backlog is written, and started again."""

    def __init__(self, servers: Servers, site: Site) -> None:
        self.servers = servers
        self.site = site

    @property
    @abstractmethod
    def pids(self) -> list[int]:
        """The processes whose CPU and memory are its own."""

    @abstractmethod
    def start(self) -> None:
        """Start it, or start it again, and return when it publishes what is written."""

    @abstractmethod
    def check(self) -> None:
        """Raise BenchError if it has ended by itself."""

    @abstractmethod
    def halt(self) -> None:
        """End it in an orderly way; what is written from now on waits for the next start."""

    def end(self) -> None:
        """End it for good, in an orderly way."""
        self.halt()

    @abstractmethod
    def kill(self) -> None:
        """End it after an error, without waiting for anything."""

    def explain(self) -> str:
        """Return the end of its log."""
        return ""


@dataclass(frozen=True)
class Way:
    """A kind of publisher, as reports name it."""

    name: str

    follows: ClassVar[bool] = True
    """Whether it publishes what is written while it runs. The bare loop passes over the table once."""

    def open(self, servers: Servers, site: Site) -> Publisher:
        """Return a publisher of this kind for a site. It does not run yet."""
        raise NotImplementedError


@contextmanager
def publishing(way: Way, servers: Servers, site: Site) -> Iterator[Publisher]:
    """Open a publisher. When the block fails, add the end of its log to the error, and kill it."""
    publisher = way.open(servers, site)
    try:
        yield publisher
        publisher.end()
    except Exception as error:
        log = publisher.explain()
        publisher.kill()
        raise BenchError(f"{type(error).__name__}: {error}\nits files: {site.folder}\n{log}") from error
    except BaseException:
        publisher.kill()
        raise
