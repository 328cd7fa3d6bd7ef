"""The forms of a report: terminal, HTML, JSON."""
