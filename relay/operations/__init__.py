"""Operator actions on an outbox, and checks of its state."""
