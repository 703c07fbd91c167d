"""What is made of results for people to read."""
