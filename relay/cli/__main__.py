"""So that ``python -m relay.cli`` is the ``outbox`` command."""

from relay.cli import main

main()
