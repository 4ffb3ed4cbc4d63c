"""Guards of the product, each taken out once: the suite must notice. ``make mutants`` runs it."""
