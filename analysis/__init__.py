"""From Arrow files to findings."""
