"""Rows of another table by numbers, held against polars' join."""

import numpy as np
import polars as pl
import pytest

from rankscope.analysis.model.lookup import looked_up, row_of


@pytest.mark.parametrize("largest", [50, 4_000_000_000], ids=["dense", "sparse"])
def test_rows_are_found_by_two_numbers_as_by_a_join(largest):
    chance = np.random.default_rng(1)
    types = {"rank": pl.Int32, "id": pl.UInt32, "value": pl.Int64}
    ids = np.append(np.unique(chance.integers(0, 50, 30)), largest)
    table = pl.DataFrame({"rank": np.repeat(np.arange(4), len(ids)), "id": np.tile(ids, 4)}).with_columns(
        value=pl.int_range(pl.len())
    )
    rows = pl.DataFrame({"rank": chance.integers(-1, 6, 500), "id": chance.integers(0, 60, 500)})
    rows = rows.with_columns(pl.when(pl.int_range(pl.len()) % 7 > 0).then("id").alias("id"))
    table, rows = table.cast(types), rows.cast({"rank": pl.Int32, "id": pl.UInt32})
    joined = rows.join(table, on=["rank", "id"], maintain_order="left")
    assert 0 < len(joined) < len(rows)
    assert looked_up(rows, table, ["rank", "id"]).equals(joined)
    assert (row_of(rows, table, ["rank", "id"]) >= 0).sum() == len(joined)
    assert row_of(rows, table.clear(), ["rank", "id"]).tolist() == [-1] * len(rows)
