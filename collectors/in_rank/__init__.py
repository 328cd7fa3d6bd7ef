"""The part inside every training process: standard library and torch only."""
