"""Settling: what a turn has published is deleted, in one transaction with the lease."""
