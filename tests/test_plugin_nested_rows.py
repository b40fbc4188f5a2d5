"""Rows out of jagged columns: what verl's own functions give, from any batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict
from verl.utils import tensordict_utils as tu

from quickstart.plugin.nested_rows import chunk_rows, is_plain_jagged, select_rows, take_rows

VERL_SELECT, VERL_CHUNK = tu.index_select_tensor_dict, tu.chunk_tensordict


def jagged(lengths: list[int], start: float = 0.0) -> torch.Tensor:
    return torch.nested.as_nested_tensor(
        [torch.arange(n) + start + 100.0 * i for i, n in enumerate(lengths)], layout=torch.jagged
    )


def batch(lengths: list[int]) -> TensorDict:
    """Two jagged columns of different lengths, a dense one, one of Python objects, and one value for all rows."""
    rows = TensorDict(
        {
            "answers": jagged(lengths),
            "prompts": jagged(lengths[::-1], 0.5),
            "score": torch.arange(len(lengths)),
            "name": NonTensorStack(*[f"row {i}" for i in range(len(lengths))]),
        },
        batch_size=len(lengths),
    )
    tu.assign_non_tensor(rows, temperature=0.5)
    return rows


def assert_same(found: TensorDict, wanted: TensorDict) -> None:
    assert found.batch_size == wanted.batch_size
    assert set(found.keys()) == set(wanted.keys())
    for name in ("answers", "prompts"):
        assert found[name].layout == torch.jagged
        assert [row.tolist() for row in found[name].unbind()] == [row.tolist() for row in wanted[name].unbind()]
        assert found[name]._get_max_seqlen() == wanted[name]._get_max_seqlen()
        assert found[name]._get_min_seqlen() == wanted[name]._get_min_seqlen()
    assert found["score"].tolist() == wanted["score"].tolist()
    assert list(found["name"]) == list(wanted["name"])
    assert tu.get(found, "temperature") == tu.get(wanted, "temperature")


@settings(deadline=None, max_examples=30)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12), data=st.data())
def test_selects_what_verl_selects(lengths: list[int], data: st.DataObject) -> None:
    index = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=12))
    for indices in (index, torch.tensor(index), [torch.tensor(i) for i in index]):
        assert_same(select_rows(VERL_SELECT)(batch(lengths), indices), VERL_SELECT(batch(lengths), indices))


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_cuts_what_verl_cuts(chunks: int) -> None:
    rows = batch([3, 1, 4, 1, 5, 9])
    found, wanted = chunk_rows(VERL_CHUNK)(rows, chunks), VERL_CHUNK(rows, chunks)
    assert len(found) == len(wanted) == chunks
    for mine, verls in zip(found, wanted, strict=True):
        assert_same(mine, verls)


def test_facts_put_on_the_one_chunk_do_not_reach_the_batch() -> None:
    """verl's engine writes on a micro batch what must not be on the mini batch."""
    rows = batch([2, 3])
    (chunk,) = chunk_rows(VERL_CHUNK)(rows, 1)
    tu.assign_non_tensor(chunk, extra=1)
    assert "extra" not in rows.keys()  # noqa: SIM118  # a TensorDict iterates over rows


def test_a_copy_not_a_view() -> None:
    column = jagged([2, 3])
    take_rows(column, torch.tensor([0, 1])).values().zero_()
    assert column.values().tolist() == [0, 1, 100, 101, 102]


def test_types_stay() -> None:
    column = torch.nested.as_nested_tensor([torch.tensor([1, 2]), torch.tensor([3])], layout=torch.jagged)
    assert take_rows(column, torch.tensor([1])).dtype == torch.int64


def test_other_layouts_are_left_to_verl() -> None:
    three = torch.nested.as_nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)
    strided = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert not any(map(is_plain_jagged, (three, strided, torch.ones(2, 2), "text")))
    rows = TensorDict({"deep": three, "flat": jagged([1, 2])}, batch_size=2)
    found = select_rows(VERL_SELECT)(rows, [1])
    assert found["deep"].unbind()[0].shape == (3, 4)
    assert found["flat"].unbind()[0].tolist() == [100, 101]
