"""From a timeline to the report: checks, causality, verdict."""
