"""Builds the hook where nothing else needs the machine, and prints in a line what came of it; the agent runs this."""

import signal
import sys

from rankscope.collectors.native_hook import build_quietly

signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what is unfinished is removed
print(build_quietly())
