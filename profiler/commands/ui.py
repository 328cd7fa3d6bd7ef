"""Look at a recorded run in the browser.

Give two runs to compare them. The page is served on this machine only; for another --host, a token is asked for.

Example: rankscope ui runs/NAME
"""

from __future__ import annotations

import gc
import ipaddress
import os
import secrets
import signal
import socket
import sys
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankscope.errors import RankscopeError
from rankscope.profiler.options import Dask, Lang, Price, Steps, World, part_of, takes

if TYPE_CHECKING:
    from werkzeug.serving import BaseWSGIServer

    from rankscope.dashboard.at_once import Front

__all__ = ["command"]

_PORT = 8050
_NEXT_PORTS = 20  # tried when the usual one is taken


@dataclass(frozen=True, slots=True)
class Options:
    """The runs that are shown, and the address of the server."""

    run: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="The run, or two of them; any trace that rankscope reads.")
    ]
    steps: Steps = None
    world: World = None
    port: Annotated[int | None, typer.Option(help=f"Serve on this port; 0 takes a free one. [default: {_PORT}]")] = None
    host: Annotated[str, typer.Option(help="Serve on this address.")] = "localhost"
    token: Annotated[str, typer.Option(help="Access token; generated if the UI is served beyond localhost.")] = ""
    lang: Lang = "en"
    price: Price = None
    dask: Dask = None


@takes(Options)
def command(options: Options) -> None:
    gc.disable()  # what imports make stays
    from rankscope.analysis.readers.dask_cluster import on_cluster

    run = _checked(options)
    host, token = options.host, options.token
    if not token and not _is_local(host):
        token = secrets.token_urlsafe(16)
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, _interrupt)
    try:
        _serve(run, options, host, token, on_cluster(options.dask))
    except KeyboardInterrupt:
        pass
    except ImportError as error:
        raise RankscopeError(f"the UI needs {error.name}: pip install 'rankscope[ui]'") from None
    # Threads may be in an analysis whose result is not needed any more.
    sys.stdout.flush()
    os._exit(0)


def _serve(run: list[Path], options: Options, host: str, token: str, cluster: AbstractContextManager[object]) -> None:
    """Serve until interrupted: what is kept of the run at once, the app as soon as it is imported."""
    from rankscope.dashboard.at_once import LOCAL, Front

    front = Front(run[0], price=options.price, lang=options.lang, hosts=() if token else {*LOCAL, host})
    server = _listen(front, host, options.port)
    with cluster:
        serving = threading.Thread(target=server.serve_forever, name="server", daemon=True)
        serving.start()
        _say_where(host, server.port, token, page="diff" if len(run) > 1 else "")

        from rankscope.dashboard.app import create_app
        from rankscope.dashboard.state import State

        state = State(run, price=options.price)
        state.start()
        front.open(create_app(state, token=token, host=host, lang=options.lang).server)
        gc.enable()
        serving.join()


def _checked(options: Options) -> list[Path]:
    """Return the paths on this machine of what is shown. Raises RankscopeError."""
    from rankscope.analysis.model.address import run_folder
    from rankscope.analysis.runs.storage import local_path

    if options.port is not None and not 0 <= options.port < 1 << 16:
        raise RankscopeError(f"--port is 0 to 65535; got {options.port}")
    run = [Path(local_path(str(path))) for path in part_of(options.run, options.steps, options.world)]
    for path in run:
        if not run_folder(path).exists():
            raise RankscopeError(f"{path} does not exist")
    if len(run) > 2:
        raise RankscopeError(f"one run, or two to compare; {len(run)} were given")
    return run


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _listen(app: Front, host: str, port: int | None) -> BaseWSGIServer:
    """Return a server that listens on the port that was asked for, else on the usual one or one of the next."""
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"  # keeps connections open: a view is many small requests

        def log_request(self, *_: object) -> None: ...

    wanted = [port] if port is not None else list(range(_PORT, _PORT + _NEXT_PORTS))
    for number in wanted:
        try:
            with socket.create_server((host, number), family=_family(host)) as listener:
                # werkzeug exits the process where it cannot bind, so it gets a socket that is bound
                return make_server(
                    host, number, app, threaded=True, request_handler=Quiet, fd=os.dup(listener.fileno())
                )
        except OSError as error:
            failed = error
    said = f"port {wanted[0]}" if len(wanted) == 1 else f"ports {wanted[0]} to {wanted[-1]}"
    raise RankscopeError(f"cannot serve on {host}, {said}: {failed.strerror or failed}; --port 0 takes a free one")


def _family(host: str) -> socket.AddressFamily:
    try:
        return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    except OSError as error:
        raise RankscopeError(f"{host} is no address of this machine: {error}") from None


def _is_local(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _say_where(host: str, port: int, token: str, page: str) -> None:
    name = f"[{host}]" if ":" in host else socket.gethostname() if host == "0.0.0.0" else host
    query = f"?token={token}" if token else ""
    print(f"rankscope: http://{name}:{port}/{page}{query}  (Ctrl-C ends it)", flush=True)
    if _is_local(host) and "SSH_CONNECTION" in os.environ:
        print(f"rankscope: from your own machine: ssh -L {port}:localhost:{port} {socket.gethostname()}", flush=True)
