"""The settings of docs/operations/debezium.md, as its readers would use them: for these tests and the benchmarks."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

PAGE: Final = Path(__file__).parents[2] / "docs" / "operations" / "debezium.md"
_BLOCK: Final = re.compile(r"^ *```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_NAME: Final = "debezium_outbox"
"""Of role, slot, publication and topic prefix on the page."""


@dataclass(frozen=True)
class Blocks:
    """The page's blocks: SQL with several statements each, and the two connectors' settings."""

    sql: list[str]
    json: list[dict[str, Any]]

    def statements(self, words: str) -> list[str]:
        """Return the statements of the block of SQL that holds these words."""
        (block,) = [text for text in self.sql if words in text]
        return [text for text in re.split(r";$", block, flags=re.MULTILINE) if text.strip()]


def blocks(name: str) -> Blocks:
    """Return the page's blocks with ``name`` in place of the page's: roles and slots belong to the whole server."""
    found = _BLOCK.findall(PAGE.read_text().replace(_NAME, name))
    read = Blocks(
        [text for language, text in found if language == "sql"],
        [json.loads(text) for language, text in found if language == "json"],
    )
    assert len(read.json) == 2
    return read
