"""Metrics of a timeline: pure functions."""
