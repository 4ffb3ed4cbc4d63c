"""`make chaos`: a load, faults at random, and a checker that compares the topics with the committed rows."""
