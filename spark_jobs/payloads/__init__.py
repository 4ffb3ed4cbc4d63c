"""Decoders: from a payload's bytes to columns."""
