"""Tasks of `workers` on a Dask cluster that is there already. Files are read and written by their paths, never sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankscope.analysis.readers.workers import Lost, Result, elsewhere, scratch_folder
from rankscope.analysis.text.message import text
from rankscope.errors import RankscopeError

if TYPE_CHECKING:
    from distributed import Client, Future

__all__ = ["on_cluster"]

_PATIENCE_S = 30  # for the scheduler to answer, and for a first worker


@contextmanager
def on_cluster(address: str | None) -> Iterator[None]:
    """While the context is open, tasks run on the workers of this scheduler; None: on this machine.

    Raises `RankscopeError` where they cannot, with what to do.
    """
    if address is None:
        yield
        return
    client = _connected(address)
    try:
        _check_workers(client, address)

        def run(
            task: Callable[..., Result], arguments: Sequence[tuple[Any, ...]], /
        ) -> AbstractContextManager[Iterator[Result | Lost]]:
            return _begun(client, task, arguments)

        with elsewhere(run):
            yield
    finally:
        client.close()


def _connected(address: str) -> Client:
    import asyncio

    try:
        from distributed import Client
    except ImportError:
        raise RankscopeError("--dask needs dask.distributed: pip install 'rankscope[dask]'") from None
    try:
        client = Client(address, timeout=_PATIENCE_S, set_as_default=False)
    except (OSError, ValueError, asyncio.TimeoutError) as error:
        why = str(error) or type(error).__name__
        raise RankscopeError(f"no Dask scheduler answers at {address}: {why.splitlines()[0]}") from None
    return client


def _check_workers(client: Client, address: str) -> None:
    """Raise `RankscopeError` unless every worker has rankscope, and sees the temporary folder of this process."""
    import asyncio

    try:
        client.wait_for_workers(1, timeout=_PATIENCE_S)
    except asyncio.TimeoutError:
        raise RankscopeError(
            f"the Dask scheduler at {address} has no worker: start some, as with `dask worker`"
        ) from None
    with scratch_folder() as folder:
        found = client.run(_sees, folder, on_error="return")
    for worker, sees in found.items():
        if isinstance(sees, Exception):
            raise RankscopeError(f"Dask worker {worker} cannot run rankscope, install it there: {sees}")
        if not sees:
            raise RankscopeError(
                f"Dask worker {worker} does not see {folder}: set TMPDIR to a folder that all workers share"
            )


def _sees(folder: str) -> bool:
    return Path(folder).is_dir()


@contextmanager
def _begun(
    client: Client, task: Callable[..., Result], arguments: Sequence[tuple[Any, ...]]
) -> Iterator[Iterator[Result | Lost]]:
    from distributed import KilledWorker

    def result_of(future: Future) -> Result | Lost:
        try:
            return future.result()  # type: ignore[no-any-return]
        except KilledWorker as error:
            return Lost(text("the process that read it was killed {times} times", times=error.allowed_failures + 1))

    futures = [client.submit(task, *of, pure=False) for of in arguments]
    try:
        yield map(result_of, futures)
    finally:
        client.cancel(futures)
