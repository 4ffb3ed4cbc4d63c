"""From a payload's bytes to columns."""
