"""The launcher and the command line."""
