"""Collectors that run in the node's agent; being a module here is the registration."""
