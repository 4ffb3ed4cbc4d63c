"""What a job does with its rows, where that is more than SQL of its own."""
