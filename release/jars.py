"""Write locks of jars, as outbox.sandbox.jars reads them: ``python -m release.jars`` that of the sandbox's Kafka."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Final

from outbox.sandbox.jars import repository, sha256_of
from outbox.sandbox.versions import KAFKA_VERSIONS, jars_of

Roots = Mapping[str, tuple[bool, tuple[str, ...]]]
"""By set: whether it includes the artifacts' dependencies, and the artifacts."""

ROOTS: Final[Roots] = {
    jars_of(version): (
        True,
        (
            f"org.apache.kafka:kafka_2.13:{version}",
            # Listed because log4j's platform would pull in an older version.
            f"org.apache.kafka:kafka-clients:{version}",
            f"org.apache.kafka:kafka-server:{version}",
            "org.apache.logging.log4j:log4j-slf4j-impl:2.25.4",
            "org.apache.logging.log4j:log4j-core:2.25.4",
            "org.apache.logging.log4j:log4j-api:2.25.4",
        ),
    )
    for version in KAFKA_VERSIONS
}


def resolve(roots: Roots, heading: Iterable[str]) -> str:
    """Resolve the roots through jgo and download every artifact. Returns the text of the lock file."""
    from jgo.maven import MavenContext

    lines = [f"# {line}" for line in heading]
    context = MavenContext(remote_repos={"repository": repository()})
    for set_name, (transitive, coordinates) in roots.items():
        wanted = [context.create_dependency(coordinate) for coordinate in coordinates]
        resolved = context.resolver.resolve(wanted, transitive=transitive)
        lines += ["", f"[{set_name}]"]
        entries = set()
        for dependency in [*resolved[0], *(resolved[1] if transitive else [])]:
            file = Path(dependency.artifact.resolve())
            coordinate = f"{dependency.groupId}:{dependency.artifactId}:{dependency.version}"
            entries.add(f"{coordinate}  sha256:{sha256_of(file)}  {file.stat().st_size}")
        lines += sorted(entries)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    heading = (
        "What Kafka is run from: Maven coordinates, SHA-256, size in bytes.",
        "Written by: python -m release.jars",
    )
    Path(str(files("outbox.sandbox").joinpath("jars.lock"))).write_text(resolve(ROOTS, heading))
