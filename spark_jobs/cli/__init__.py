"""The consumers' commands."""
