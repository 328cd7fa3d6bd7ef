"""The agent: one process per node that reads the ranks' rings and writes Arrow files."""
