"""The package's long description: the README, without its links to files of the repository, which lead nowhere there.

Hatchling runs this whenever it reads the project's metadata. With a ``Source`` among ``[project.urls]``, they lead to
that repository at the version's tag instead.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK: Final = re.compile(r"(!?)\[([^\]]+)\]\((?!#|\w+:)([^)\s]+)\)")
_NOTE: Final = "\nThe documentation is in the source distribution, in `docs`.\n"


def long_description(readme: str, source: str | None, version: str) -> str:
    """Return the README with absolute links into the repository at ``source``, or without links to files."""

    def link(found: re.Match[str]) -> str:
        image, text, target = found.groups()
        if source is None:
            return "" if image else text
        return f"{image}[{text}]({source.rstrip('/')}/{'raw' if image else 'blob'}/v{version}/{target})"

    return _LINK.sub(link, readme) + ("" if source else _NOTE)


class ReadmeHook(MetadataHookInterface):
    """Sets ``readme``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the long description to the project's metadata."""
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = long_description(readme, metadata.get("urls", {}).get("Source"), metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
