"""``outbox …`` whose consumers have less patience, for tests of giving up. Nothing else differs.

| what                                             | seconds | here |
|--------------------------------------------------|---------|------|
| that ``--once`` waits for a server that is away  | 60      | 10   |
| for an answer of Kafka's to the driver           | 20      | 6    |
| for a task that reads Kafka to hear of it        | 30      | 6    |

Not less: on a slow machine a server that is there may take seconds to answer.
"""

from __future__ import annotations

from typing import Any

from outbox.consumer import kafka_admin as kafka
from relay.cli import main
from spark_jobs.driver import options
from spark_jobs.task import reader


def impatient(function: Any, name: str, was: float, seconds: float) -> None:
    """Give a parameter another default."""
    code = function.__code__
    if name in (function.__kwdefaults__ or {}):
        assert function.__kwdefaults__[name] == was
        function.__kwdefaults__[name] = seconds
        return
    names = code.co_varnames[: code.co_argcount]
    defaults = list(function.__defaults__)
    at = names.index(name) - len(names)
    assert defaults[at] == was
    defaults[at] = seconds
    function.__defaults__ = tuple(defaults)


if __name__ == "__main__":
    impatient(options.Options.__init__, "patience", 60.0, 10.0)
    impatient(kafka.KafkaAdmin.__init__, "seconds", 20.0, 6.0)
    impatient(reader.ReaderSettings.__init__, "patience_seconds", 30.0, 6.0)
    main()
