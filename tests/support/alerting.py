"""Which alerts fire for what is scraped: promtool evaluates the real rules, without a Prometheus and without waits."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Final

from docs_support import DOCS
from prometheus import require
from prometheus_client import CollectorRegistry, generate_latest

RULES: Final = DOCS / "operations" / "monitoring" / "alerts.yaml"
_ASKED: Final = frozenset(re.findall(r"outbox_\w+", RULES.read_text()))
_NOW: Final = 600
"""At which second of promtool's clock the rules are evaluated."""
_GROWING: Final = re.compile(r"outbox_\w+_(?:wait|age)_seconds\b")

Samples = dict[str, float]


def parsed(text: str, instance: str = "a") -> Samples:
    """Return the samples of a scrape by their series, with a label for the process and with times of promtool's."""
    found = {}
    for line in text.splitlines():
        if line.startswith("outbox_"):
            series, value = line.rsplit(" ", 1)
            name, _, labels = series.rstrip("}").partition("{")
            number = float(value)
            if name.endswith("_timestamp_seconds"):
                number -= time.time() - _NOW
            found[f'{name}{{{labels}{"," if labels else ""}instance="{instance}"}}'] = number
    return found


def scraped(*addresses: str) -> Samples:
    """Return what these processes show. One that does not answer shows nothing."""
    found = {}
    for address in addresses:
        try:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
                found |= parsed(answer.read().decode(), address)
        except OSError:
            continue
    return found


def collected(registry: CollectorRegistry) -> Samples:
    """Return what a process with this registry would show."""
    return parsed(generate_latest(registry).decode())


def firing(now: Samples, before: Samples | None = None, *, later: float = 0.0) -> set[str]:
    """Return the alerts that fire, of whatever outbox; see firing_by_outbox."""
    return {alert for alert, _ in firing_by_outbox(now, before, later=later)}


def firing_by_outbox(now: Samples, before: Samples | None = None, *, later: float = 0.0) -> set[tuple[str, str | None]]:
    """Return the alerts that fire, each with its outbox. Their waits are left out.

    before  what was scraped six minutes ago; if not given, the same. A series that is gone since then is stale.
    later   evaluate it as so many seconds later, if nothing changes: waits and ages are longer by them.
    """
    before = now if before is None else before
    series = []
    for name in sorted({*before, *now}):
        if name.partition("{")[0] not in _ASKED:
            continue
        grown = later if _GROWING.match(name) and now.get(name, 0.0) > 0 else 0.0
        first = f"{before[name]:f}+0x3" if name in before else "_x3"
        then = f"{now[name] + grown:f}+0x10" if name in now else "stale"
        series.append((name, f"{first} {then}"))
    return set(_evaluated(tuple(series)))


@functools.lru_cache(maxsize=1_000)
def _evaluated(series: tuple[tuple[str, str], ...]) -> frozenset[tuple[str, str | None]]:
    """Return the alerts and their outboxes. What is waited for is often the same as at the last look."""
    alerts = 'count by (alertname, outbox) (ALERTS{alertstate="firing"})'
    with tempfile.TemporaryDirectory(prefix="outbox-alerts-") as folder:
        rules = re.sub(r"^ +for: \w+\n", "", RULES.read_text(), flags=re.MULTILINE)
        Path(folder, "rules.yaml").write_text(rules)
        test = {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series],
            # It expects none, and names what there is.
            "promql_expr_test": [{"expr": alerts, "eval_time": f"{_NOW}s", "exp_samples": []}],
        }
        Path(folder, "test.yaml").write_text(
            json.dumps({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]})
        )
        command = [require("promtool"), "test", "rules", "test.yaml"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    alert = re.compile(r'alertname="(\w+)"(?:, outbox="([^"]+)")?')
    found = frozenset((name, outbox or None) for name, outbox in alert.findall(done.stdout + done.stderr))
    assert bool(found) == bool(done.returncode), done.stdout + done.stderr
    return found
