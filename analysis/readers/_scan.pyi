"""The compiled scanner; scan.py says what it does."""

ROW_BYTES: int
META_BYTES: int

class State: ...

def new(whole: tuple[bytes, ...], brief: tuple[bytes, ...], shaped: tuple[bytes, ...], /) -> State: ...
def scan(
    state: State,
    data: bytearray,
    start: int,
    end: int,
    final: bool,
    lost: bool,
    rows: bytearray,
    metas: bytearray,
    n_rows: int,
    n_metas: int,
    /,
) -> tuple[int, int, int, int]: ...
def names(state: State, first: int, /) -> list[bytes]: ...
def counts(state: State, /) -> tuple[int, int, int, int]: ...
