"""What runs inside every training process: standard library and torch only."""
