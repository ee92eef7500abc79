"""Fields of the same rows in one tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from imdm.sampling.table import ALIGNED, FetchedTable, Table


def columns(rows: int, width: int = 5, seed: int = 0) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {
        "bits": torch.rand(rows, width, generator=made) > 0.5,
        "ids": torch.randint(-9, 9, (rows, width), generator=made),
        "strided": torch.rand(rows, 2 * width, generator=made)[:, ::2],
        "time": torch.rand(rows, generator=made, dtype=torch.float64),
        "count": torch.randint(9, (rows,), generator=made, dtype=torch.int32),
    }


def assert_same(table: Table, wanted: dict[str, Tensor]) -> None:
    found = table.columns()
    assert found.keys() == wanted.keys()
    for name, column in wanted.items():
        assert found[name].dtype == column.dtype
        assert torch.equal(found[name], column)


@pytest.mark.parametrize("rows", [0, 1, 4])
@pytest.mark.parametrize("width", [0, 1, 5])
def test_columns_come_out_as_they_went_in(rows: int, width: int) -> None:
    given = columns(rows, width)
    table = Table.of(given)
    assert table.data.shape[1] % ALIGNED == 0
    assert_same(table, given)
    assert_same(FetchedTable(table).wait(), given)


def test_a_column_is_a_view_of_its_place_alone() -> None:
    given = columns(4)
    table = Table.of(given)
    ids, bits = table.columns()["ids"], table.columns()["bits"]
    ids[torch.tensor([2, 0]), torch.tensor([4, 1])] = torch.tensor([77, 78])
    bits[1] = False
    given["ids"][[2, 0], [4, 1]] = torch.tensor([77, 78])
    given["bits"][1] = False
    assert_same(table, given)


def test_rows_are_picked_joined_and_moved_with_all_fields() -> None:
    first, second = columns(4), columns(3, seed=1)
    both = Table.of(first).joined([Table.of(second)])
    assert_same(both, {name: torch.cat((column, second[name])) for name, column in first.items()})
    index = torch.tensor([5, 0, 0])
    picked = both.at(index)
    assert_same(picked, {name: torch.cat((column, second[name]))[index] for name, column in first.items()})
    picked.columns()["ids"][:] = 0  # a copy
    assert torch.equal(both.columns()["ids"][:4], first["ids"])
    moved = both.to(torch.device("meta")).columns()
    assert all(column.is_meta for column in moved.values())
    assert moved["strided"].shape == (7, 5)


@pytest.mark.parametrize("rows", [1, 4])
def test_copies_are_without_the_table(rows: int) -> None:
    given = columns(rows)
    table = Table.of(given)
    found = table.copied("ids", "time", "absent")
    assert found.keys() == {"ids", "time"}
    for name, column in found.items():
        assert column.stride() == given[name].stride()
        assert column.untyped_storage().nbytes() == given[name].nbytes
        assert torch.equal(column, given[name])
    found["ids"][:] = 0
    assert_same(table, given)


def test_tables_of_other_layouts_are_not_joined() -> None:
    with pytest.raises(ValueError, match="different layouts"):
        Table.of(columns(4)).joined([Table.of(columns(4, width=3))])
