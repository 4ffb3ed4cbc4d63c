"""What operators do: dead letters, offsets, how far the groups are."""
