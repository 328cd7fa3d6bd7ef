"""NCCL's RAS, asked when a job hangs: which ranks launched fewer operations than others, and which do not answer.

Every process of a NCCL job (2.24 or later) has a RAS thread; together they are a network of their own, and one of them
answers for all. So only node 0's agent asks. The answer is JSON where NCCL offers it, else a text for people; the text
names only the ranks that differ from most. Source: NCCL user guide, "RAS", and what its client `ncclras` says.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from queue import SimpleQueue
from typing import Any

from rankscope.collectors.schema import STILL_NS, STILL_STEPS
from rankscope.collectors.untyped import Foreign

__all__ = ["Ras", "address", "ask", "understood"]

PORT = 28028
_AGAIN_S = 60.0  # between two questions, whatever happens
_ATTEMPTS, _GREETING_S = 8, 1.0
_GATHER_S, _ANSWER_S = 3, 15.0  # for one process to answer RAS; for RAS to answer us
_MOST_BYTES = 64 * 1024 * 1024
_LINE_BYTES = 4096

Row = dict[str, Any]


class Ras:
    """Asks once each time that the job hangs.

    `answers` fills with (time_ns, text, rows of the table `ras`: none if the text is not understood), `gaps` with one
    line, once.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.answers: SimpleQueue[tuple[int, str, list[Row]]] = SimpleQueue()
        self.gaps: SimpleQueue[str] = SimpleQueue()
        self._environ = environ
        self._may_fail = True
        self._asked_about: int | None = None
        self._asked_at = -_AGAIN_S
        self._thread: threading.Thread | None = None

    def look(self, last_ns: int, usual_step_ns: int) -> None:
        """Ask RAS in a thread, if the ranks began something at `last_ns` and nothing since, and that is long ago."""
        still_ns = time.perf_counter_ns() - last_ns
        if still_ns < max(STILL_NS, STILL_STEPS * usual_step_ns) or self._asked_about == last_ns:
            return
        if time.monotonic() - self._asked_at < _AGAIN_S or (self._thread and self._thread.is_alive()):
            return
        self._asked_about, self._asked_at = last_ns, time.monotonic()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for an open query, and report it if it does not end."""
        if self._thread:
            self._thread.join(_GREETING_S)
            if self._thread.is_alive():
                self._fail("it had not answered when the job ended")

    def _ask(self) -> None:
        try:
            where = address(self._environ)
            if where is None:
                self._fail("NCCL_RAS_ENABLE=0 switches it off")
                return
            answer, now_ns = ask(*where), time.perf_counter_ns()
        except ConnectionRefusedError:
            self._fail("nothing listens at its address: NCCL is older than 2.24, or NCCL_RAS_ADDR differs in the ranks")
        except TimeoutError:
            self._fail("it is silent")
        except (OSError, ValueError) as error:
            self._fail(str(error))
        else:
            self.answers.put((now_ns, answer, self._rows(answer)))

    def _rows(self, answer: str) -> list[Row]:
        try:
            return understood(answer)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            self._fail(f"its answer, run/ras.txt, is not understood: {error!r}")
            return []

    def _fail(self, why: str) -> None:
        if self._may_fail:
            self._may_fail = False
            self.gaps.put(f"the job hung, and NCCL's RAS did not say who lags: {why}")


def address(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the address of this node's RAS threads; None if they are switched off. Raises ValueError."""
    if environ.get("NCCL_RAS_ENABLE") == "0":
        return None
    host, _, port = environ.get("NCCL_RAS_ADDR", f"localhost:{PORT}").rpartition(":")
    return host.strip("[]") or "localhost", int(port)


def ask(host: str, port: int) -> str:
    """Return the answer of RAS. Raises OSError or ValueError."""
    for _ in range(_ATTEMPTS):
        # All processes of a node listen on one port, and the system chooses which gets a connection: it may be stopped.
        with socket.create_connection((host, port), _GREETING_S) as channel, channel.makefile("rb") as lines:
            try:
                greeting = _say(channel, lines, "CLIENT PROTOCOL 2")
            except TimeoutError:
                continue
            if not greeting.startswith("SERVER PROTOCOL"):
                raise ValueError(f"what answers is not RAS: {greeting[:80]!r}")
            _say(channel, lines, f"TIMEOUT {_GATHER_S}")
            _say(channel, lines, "SET FORMAT json")  # an error in older versions, which then answer in text
            channel.settimeout(_ANSWER_S)
            channel.sendall(b"VERBOSE STATUS\n")
            answer: bytes = lines.read(_MOST_BYTES)
            return answer.decode(errors="replace")
    raise TimeoutError


def _say(channel: socket.socket, lines: Foreign, command: str) -> str:  # a buffered reader of the channel
    channel.sendall(command.encode() + b"\n")
    return str(lines.readline(_LINE_BYTES).decode(errors="replace")).strip()


def understood(answer: str) -> list[Row]:
    """Rows of the table `ras`, without a time. Raises ValueError, LookupError or TypeError if this is no answer."""
    if answer.lstrip().startswith("{"):
        return [row for said in json.loads(answer)["communicators"] for row in _of_json(said)]
    if "Communicators..." not in answer:
        raise ValueError("neither JSON nor the text of NCCL's client")
    return list(_of_text(answer))


def _row(communicator: str, size: int | None, **known: object) -> Row:
    """Return a row of which nothing more is known than this."""
    nothing = {"comm_rank": None, "pid": None, "host": "", "operation": "", "launched": None, "state": "running"}
    return {"communicator": communicator, "size": size} | nothing | known


# ---- JSON


def _of_json(said: Mapping[str, Any]) -> Iterator[Row]:
    """One communicator: a row for each of its ranks and operations."""
    communicator, size = str(said["hash"]).removeprefix("0x"), int(said["size"])
    ops = sorted({op for rank in said["ranks"] for op, count in rank["collective_counts"].items() if count})
    for rank in said["ranks"]:
        process = {"comm_rank": int(rank["rank"]), "pid": int(rank["pid"]), "host": str(rank["host"])}
        state = _state_of(rank["status"])
        for op in ops or [""]:
            launched = int(rank["collective_counts"].get(op, 0))
            yield _row(communicator, size, **process, operation=op, launched=launched, state=state)
    for rank in said["missing_ranks"]:
        status = rank["status"]
        missing = "unresponsive" if status["unresponsive"] else "not a member"
        process = {"comm_rank": int(rank["rank"]), "pid": int(rank["pid"]), "host": str(rank["host"])}
        yield _row(communicator, size, **process, state="dead" if status["considered_dead"] else missing)


def _state_of(status: Mapping[str, Any]) -> str:
    success, in_progress = 0, 7  # of ncclResult_t
    if status["abort_flag"]:
        return "aborted"
    if {status["init_state"], status["async_error"]} - {success, in_progress}:
        return "error"
    if status["finalize_called"] or status["destroy_flag"]:
        return "ending"
    return "initialising" if status["init_state"] == in_progress else "running"


# ---- text

_GROUP = re.compile(r"\s*(\d+)\s+\d+\s+\d+\s+[\d-]+\s+(\d+)\s+\d+\s+[A-Z]+\s+[A-Z,]+\s*")  # of the table of groups
_HEAD = re.compile(r"#(\d+)-\d+ \(([0-9a-f]+)\) ([A-Z]+)")
_COUNTED = re.compile(r"\s+Communicator ranks have different (?:(\w+) operation counts|status)")
_MANY = re.compile(r"\s+\d+ ranks have (?:launched up to operation (\d+)|not launched any operations)")
_PLACE = r"(?:.* managed by process (\d+) on node (\S+)|.*)"
_RANK = re.compile(rf"\s+Rank (\d+)(?: has launched up to operation (\d+)| has (not) launched .+?| .+?)? -- {_PLACE}")
_PROCESS = re.compile(r"\s+Process (\d+) on node (\S+) managing GPU.*")


def _of_text(text: str) -> Iterator[Row]:
    """Each rank that is listed; of the others, which are not, how many operations they have launched."""
    sizes: dict[str, int] = {}
    communicator, size, op, launched, state = "", None, "", None, ""
    for line in text.splitlines():
        if found := _GROUP.fullmatch(line):
            sizes[found[1]] = int(found[2])
        elif line in ("INCOMPLETE", "DEAD"):
            communicator, size, op, launched = "", None, "", None
            state = "dead" if line == "DEAD" else "unresponsive"
        elif found := _HEAD.match(line):
            communicator, size, op, launched = found[2], sizes.get(found[1]), "", None
            state = {"INCOMPLETE": "unresponsive", "ERROR": "error"}.get(found[3], "")
        elif found := _COUNTED.fullmatch(line):
            op, launched, state = found[1] or "", None, "running" if found[1] else ""
        elif found := _MANY.fullmatch(line):
            launched = int(found[1] or 0)
            yield _row(communicator, size, operation=op, launched=launched)
        elif (found := _RANK.fullmatch(line)) and state:
            own = int(found[2]) if found[2] else 0 if found[3] else launched
            process = {"pid": int(found[4]), "host": found[5]} if found[4] else {}
            yield _row(communicator, size, comm_rank=int(found[1]), **process, operation=op, launched=own, state=state)
        elif found := _PROCESS.fullmatch(line):
            yield _row("", None, pid=int(found[1]), host=found[2], state=state)
