"""``outbox …`` whose ``consume --once`` waits for a server that is away for 10 seconds and not for 60.

Not less: on a slow machine a server that is there may take seconds to answer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from relay.cli import main
from spark_jobs.driver import options

if __name__ == "__main__":
    real = options.options_of

    def impatient(*given: Any) -> options.Options:
        return replace(real(*given), patience=10.0)

    options.options_of = impatient
    main()
