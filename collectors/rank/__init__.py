"""Collectors that run in every rank; being a module here is the registration."""
