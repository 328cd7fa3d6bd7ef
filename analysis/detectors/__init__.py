"""One module per diagnosis; being a module here is the registration."""
