"""``make dist``: the files of a release, in ``dist``."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

from release.build import BadRelease, build, last_commit, require_committed
from release.sbom import NotLocked, sbom

ROOT: Final = Path(__file__).parents[1]


def main() -> None:
    """Build, check, and print each file with its SHA-256."""
    out = ROOT / "dist"
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory() as work:
        require_committed(ROOT)
        built = build(ROOT, Path(work), out)
    bill = out / built.sdist.name.replace(".tar.gz", ".cdx.json")
    files = [built.sdist, built.wheel]
    document = sbom(built.wheel, files, (ROOT / "requirements.lock").read_text(), last_commit(ROOT))
    bill.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for file in (*files, bill):
        print(hashlib.sha256(file.read_bytes()).hexdigest(), f"dist/{file.name}")


if __name__ == "__main__":
    try:
        main()
    except (BadRelease, NotLocked) as error:
        sys.exit(f"make dist: {error}")
