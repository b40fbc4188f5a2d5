"""Rows out of jagged columns in a few operations a column instead of some for each row.

verl cuts a batch into mini batches and these into micro batches by unbinding each column into all of its rows, once for
each mini batch, and putting the wanted ones together again: time that grows with the square of the batch, and a quarter
of what an update of a small model takes on a GPU, which waits meanwhile. Here one index takes the tokens of the wanted
rows out of the one tensor in which they lie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict


def is_plain_jagged(column: Any) -> bool:
    """Whether rows of one axis, each of its own length, lie one behind the other. Others are left to verl."""
    return (
        isinstance(column, torch.Tensor)
        and column.is_nested
        and column.layout == torch.jagged
        and column.dim() == 2
        and column.lengths() is None
    )


def take_rows(column: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of a jagged column.

    Args:
        column: jagged, (rows, tokens of each).
        index: (wanted,) row numbers, in any order.

    Returns:
        jagged, (wanted, tokens of each); a copy, as verl's.
    """
    old = column.offsets()
    index = index.to(old.device)
    lengths = old.diff()[index]
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    shift = torch.repeat_interleave(old[index] - offsets[:-1], lengths)
    values = column.values()[torch.arange(len(shift), device=shift.device) + shift]
    shortest, longest = torch.aminmax(lengths)
    return torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=int(shortest), max_seqlen=int(longest))


def select_rows(original: Callable[..., TensorDict]) -> Callable[..., TensorDict]:
    """verl.utils.tensordict_utils.index_select_tensor_dict (given), with jagged columns taken at once."""

    def select(batch: TensorDict, indices: torch.Tensor | list[int]) -> TensorDict:
        jagged = _jagged(batch)
        if not jagged:
            return original(batch, indices)
        rows = original(batch.exclude(*jagged), indices)
        index = torch.as_tensor(indices)
        for name, column in jagged.items():
            rows[name] = take_rows(column, index)
        return rows

    return select


def chunk_rows(original: Callable[..., list[TensorDict]]) -> Callable[..., list[TensorDict]]:
    """verl.utils.tensordict_utils.chunk_tensordict (given), without cutting where one chunk is asked for."""

    def chunk(td: TensorDict, chunks: int) -> list[TensorDict]:
        return [td.copy()] if chunks == 1 else original(td, chunks)

    return chunk


def _jagged(batch: Any) -> dict[str, torch.Tensor]:
    return {name: column for name, column in batch.items() if is_plain_jagged(column)}
