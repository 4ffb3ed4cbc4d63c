"""What a relay answers to Prometheus and to a readiness probe, over real HTTP."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Mapping

from support import wait_until

LEASE = 1.0
"""Of the relays that are looked at, in seconds."""


def get(url: str, headers: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Return the status and the text of an answer. 0 while no server answers."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=dict(headers or {})), timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError:
        return 0, ""


class Shown:
    """What one relay answers."""

    def __init__(self, port: int) -> None:
        self.address = f"127.0.0.1:{port}"

    def ready(self) -> tuple[int, dict[str, list[int]]]:
        """Return the status of /readyz, and which lanes wait for which reason. 0 while no server answers."""
        status, body = get(f"http://{self.address}/readyz")
        if not status:
            return 0, {}
        found = json.loads(body)
        assert found["ready"] is (status == 200)
        return status, {wait["reason"]: wait["lanes"] for wait in found["waits"]}

    def checks(self) -> tuple[int, list[str]]:
        """Return the status of /readyz?verbose, and its lines. 0 while no server answers."""
        status, text = get(f"http://{self.address}/readyz?verbose")
        return status, text.splitlines()

    def metric(self, name: str, reason: str | None = None) -> float:
        """Return a figure."""
        label = "" if reason is None else f',reason="{reason}"'
        _, text = get(f"http://{self.address}/metrics")
        found = re.search(rf'^outbox_relay_{name}{{outbox="[^"]+"{label}}} (.+)$', text, re.MULTILINE)
        assert found is not None, text
        return float(found[1])

    def stands(self, reason: str, lanes: list[int] | None = None) -> None:
        """Wait until the relay is not ready, and these lanes (or some) wait for this reason, or the worker."""

        def standing() -> bool:
            status, waits = self.ready()
            waiting = reason in waits if lanes is None else waits == {reason: lanes}
            # All of it at once: a relay whose leases have run out meanwhile begins to count anew.
            return (
                status == 503
                and waiting
                and self.metric("lane_wait_seconds", reason) >= 3 * LEASE
                and self.metric("lanes_waiting", reason) > 0
                and self.metric("ready") == 0
            )

        wait_until(standing, what=f"lanes to stand still for {reason}")

    def recovers(self) -> None:
        """Wait until the relay is ready, and no lane waits."""
        wait_until(lambda: self.ready() == (200, {}) and self.metric("ready") == 1, 60, "the relay to be ready")
