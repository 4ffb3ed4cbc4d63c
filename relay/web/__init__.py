"""What a relay shows over HTTP."""
