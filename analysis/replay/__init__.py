"""Execution graphs, what-if and the critical path."""
