"""What is opened, and how much of it."""
