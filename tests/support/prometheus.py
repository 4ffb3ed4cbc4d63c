"""A real Prometheus that scrapes what tests run, and evaluates the alert rules each second."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from support import wait_until

from outbox.sandbox._ports import free_ports

_INSTALL = "there is no {}: apt-get install prometheus (brew install prometheus), or put it into the PATH"


def require(program: str) -> str:
    """Return the program. Where there is none, CI fails; elsewhere the test is skipped, as without a PgBouncer."""
    found = shutil.which(program)
    if found is None and os.environ.get("CI"):
        pytest.fail(_INSTALL.format(program))
    elif found is None:
        pytest.skip(_INSTALL.format(program))
    return found


class Prometheus:
    """Scrapes these ports of 127.0.0.1 each second. ``rules`` fire at once: their waits are left out."""

    def __init__(self, folder: Path, ports: Sequence[int], rules: Path) -> None:
        (self._port,) = free_ports(1)
        self._folder = folder
        without_waits = re.sub(r"^ +for: \w+\n", "", rules.read_text(), flags=re.MULTILINE)
        (folder / "rules.yaml").write_text(without_waits)
        targets = json.dumps([f"127.0.0.1:{port}" for port in ports])
        (folder / "prometheus.yaml").write_text(
            "global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}\n"
            f"rule_files: [{folder / 'rules.yaml'}]\n"
            f"scrape_configs: [{{job_name: outbox, static_configs: [{{targets: {targets}}}]}}]\n"
        )
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        command = [
            require("prometheus"),
            f"--config.file={self._folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self._port}",
            "--log.level=warn",
        ]
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_until(self._ready, what="Prometheus")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(30)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the result of a query, which has to be a vector."""
        answer = self._get(f"/api/v1/query?query={urllib.parse.quote(expression)}")
        assert answer["status"] == "success", answer
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def firing(self) -> set[str]:
        """Return the alerts that fire now."""
        return {one["metric"]["alertname"] for one in self.query('ALERTS{alertstate="firing"}')}

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/-/ready", timeout=5):
                return True
        except OSError:
            return False

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=30) as answer:
            return json.loads(answer.read())
