"""Runs jobs with the collectives hook in C++ under AddressSanitizer and UndefinedBehaviorSanitizer.

    PYTHONPATH=tests python -m support.fuzz.hook

Needs g++ on Linux and root, and takes some minutes: builds the hook into a temporary folder, and runs every scenario of
`support/harm` with it. Prints what the sanitizers say, and how many jobs there were.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

from rankscope.collectors.native import collectives_hook
from support.agent import Agent
from support.fuzz.scan import address_sanitizer
from support.harm.jobs import NAMES, Jobs, recorded_by

FLAGS = "-g -fsanitize=address,undefined -fno-sanitize-recover=all"
SAYS = ("AddressSanitizer", "runtime error:")
# The sanitizers need more room, and a pipe to look whether memory is there.
LEFT_OUT = ("has_hardly_any_address_space", "has_no_descriptors_left")


def main() -> None:
    library = address_sanitizer()
    if library is None:
        sys.exit("gcc has no AddressSanitizer here")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": made, "CXX": f"g++ {FLAGS}"}):
            collectives_hook.build(limit_s=1800)
        agent = Agent(folder / "run")
        throws = subprocess.run(["gcc", "-print-file-name=libstdc++.so.6"], capture_output=True, text=True, check=True)
        options = "detect_leaks=0:handle_segv=0:handle_abort=0"
        environment = {
            "LD_PRELOAD": f"{library} {throws.stdout.strip()}",
            "ASAN_OPTIONS": options,
            "PYTHONMALLOC": "malloc",
        }
        jobs = Jobs(folder / "jobs", {"C++": recorded_by(agent.name, folder)}, **environment)
        said = 0
        for name in NAMES:
            if name not in LEFT_OUT:
                jobs.run(name)
                for rank in jobs.ended[name]["C++"]:
                    if any(word in rank.stderr for word in SAYS):
                        said += 1
                        print(name, rank.stderr[-3000:], sep="\n", flush=True)
        jobs.end()
        agent.end()
    print(f"{len(jobs.ended)} jobs of 2 ranks; the sanitizers said something of {said} ranks")
    sys.exit(said > 0)


if __name__ == "__main__":
    main()
