"""``make demo``: orders, from the shop's transaction to the sink's tables, with kills on the way."""
