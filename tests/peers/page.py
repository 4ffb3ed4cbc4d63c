"""What docs/operations/debezium.md says and names, as its readers would use it: for these tests and the benchmarks."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_ROOT: Final = Path(__file__).parents[2]
PAGE: Final = _ROOT / "docs" / "operations" / "debezium.md"
SETTINGS: Final = ("deploy/debezium/outbox.json", "deploy/debezium/outbox-bytes.json")
_SQL: Final = re.compile(r"^ *```sql\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_NAME: Final = "debezium_outbox"
"""Of role, slot, publication and topic prefix on the page."""


@dataclass(frozen=True)
class Blocks:
    """The page's blocks of SQL, with several statements each, and the two connectors' settings, which it names."""

    sql: list[str]
    json: list[dict[str, Any]]

    def statements(self, words: str) -> list[str]:
        """Return the statements of the block of SQL that holds these words."""
        (block,) = [text for text in self.sql if words in text]
        return [text for text in re.split(r";$", block, flags=re.MULTILINE) if text.strip()]


def blocks(name: str) -> Blocks:
    """Return them with ``name`` in place of the page's: roles and slots belong to the whole server."""

    def read(file: Path) -> str:
        return file.read_text().replace(_NAME, name)

    assert all(file in PAGE.read_text() for file in SETTINGS)
    return Blocks(_SQL.findall(read(PAGE)), [json.loads(read(_ROOT / file)) for file in SETTINGS])
