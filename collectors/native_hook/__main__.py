"""Builds the hook if the machine is idle, and prints the result in a line; the agent runs this."""

import signal
import sys

from rankscope.collectors.native_hook import build_quietly

signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what is unfinished is removed
print(build_quietly())
