"""The page's sampler goes on after an error of any kind, and says that it has none of the figures meanwhile."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from support import wait_until

from relay.page.sampling import Sampler
from relay.pipeline.overview import Overview


class Figures:
    """Fail once, in the overview or in the latency, with an error that is none of ours."""

    def __init__(self, where: str) -> None:
        self.where, self.fails, self.seen = where, True, threading.Event()

    def read(self, _before: Overview | None) -> Overview:
        if not self.fails:
            assert self.seen.wait(60)
        self._fail("overview")
        return Overview(None, (), {}, None)

    def latency(self) -> None:
        self._fail("latency")

    def close(self) -> None:
        pass

    def _fail(self, where: str) -> None:
        if where == self.where and self.fails:
            self.fails = False
            raise ValueError("strange")


@pytest.mark.parametrize("where", ["overview", "latency"])
def test_an_unknown_error_is_shown_and_the_figures_are_read_again(where):
    figures: Any = Figures(where)
    sampler = Sampler(figures, figures.latency, lambda _state: None, refresh_seconds=0.01)
    try:
        first = sampler.latest()
        assert first is not None
        assert first.unseen == {"the pipeline": "ValueError; see the log"}
        figures.seen.set()

        def seen() -> bool:
            latest = sampler.latest()
            return latest is not None and not latest.unseen

        wait_until(seen, what="new figures")
    finally:
        figures.seen.set()
        sampler.close()
