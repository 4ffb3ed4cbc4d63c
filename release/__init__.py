"""What `make dist` does: wheel, sdist and their bill of materials, built twice from one commit and looked through."""
