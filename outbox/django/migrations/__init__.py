"""One for each revision in the repository's migrations/, with the same number. They have no SQL of their own."""
