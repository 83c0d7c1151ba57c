"""What writes the files that are committed; one command each."""
