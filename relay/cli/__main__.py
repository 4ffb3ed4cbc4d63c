"""Makes ``python -m relay.cli`` the ``outbox`` command."""

from relay.cli import main

main()
