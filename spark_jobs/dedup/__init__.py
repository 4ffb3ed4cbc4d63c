"""Which messages were applied before."""
