"""Recognizing messages that were applied before."""
