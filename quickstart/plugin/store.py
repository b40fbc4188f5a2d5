"""The rows of a batch, in memory: stands where verl's trainer expects the `transfer_queue` package.

verl's V1 trainer keeps every row (prompt, response, scores, advantages ...) in TransferQueue, a set of Ray actors, and
passes only keys around. In one process a dictionary does the same. The calls and their meaning are TransferQueue's
(transfer_queue/interface.py, `kv_*`); only those that the synchronous trainer uses exist here, and any other call is an
AttributeError, which is the point: a new verl must not find a half-true queue.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta

Tag = dict[str, Any]


def split_column(column: Any, rows: int) -> list[Any]:
    """One column of a TensorDict as one value a row (jagged and dense tensors, stacks, a value shared by all)."""
    if isinstance(column, NonTensorData):
        return [column.data] * rows
    if isinstance(column, NonTensorStack):
        return column.tolist()
    return list(column.unbind(0))


def join_column(values: list[Any]) -> Any:
    """One value a row as one column, packed as TransferQueue packs it: scalars stacked, vectors jagged."""
    if all(isinstance(value, torch.Tensor) for value in values):
        if values[0].dim() == 0:
            return torch.stack(values)
        return torch.nested.as_nested_tensor(values, layout=torch.jagged)
    return NonTensorStack(*values)


class MemoryStore:
    """Rows and tags by partition ("train", "val") and key (`{uid}_{session}_{index}`, or `{uid}` for a prompt)."""

    def __init__(self) -> None:
        self._tags: dict[str, dict[str, Tag]] = defaultdict(dict)
        self._rows: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
        self.before_clear: Callable[[list[str], str], None] = lambda keys, partition: None  # a last look at rows

    def kv_batch_put(
        self,
        keys: Sequence[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: Sequence[Tag] | None = None,
    ) -> KVBatchMeta:
        """Add or update rows. Given tags are merged into the old ones, given fields replace fields of that name."""
        all_tags, all_rows = self._tags[partition_id], self._rows[partition_id]
        for i, key in enumerate(keys):
            all_tags.setdefault(key, {}).update(tags[i] if tags else {})
            all_rows.setdefault(key, {})
        for name, column in () if fields is None else fields.items():
            for key, value in zip(keys, split_column(column, len(keys)), strict=True):
                all_rows[key][name] = value
        return KVBatchMeta(
            keys=list(keys),
            tags=[all_tags[key] for key in keys],
            partition_id=partition_id,
            fields=list(all_rows[keys[0]]),
        )

    def kv_put(self, key: str, partition_id: str, fields: dict[str, Any] | None = None, tag: Tag | None = None) -> None:
        """Tag one row; verl's synchronous path never puts fields of a single row."""
        assert fields is None, "verl's synchronous trainer puts fields in batches only"
        self.kv_batch_put([key], partition_id, None, [tag or {}])

    def tensors(self, keys: Sequence[str], partition_id: str, without: Sequence[str] = ()) -> TensorDict:
        """The tensor columns of rows. Workers read no others, and a column of Python objects costs more than it holds:
        TensorDict handles each of its cells as a TensorDict.

        Args:
            without: columns that are left out; one that is not there is no error.
        """
        first = self._rows[partition_id][keys[0]]
        names = [name for name, value in first.items() if isinstance(value, torch.Tensor) and name not in without]
        return self.kv_batch_get(keys, partition_id, names)

    def kv_batch_get(
        self, keys: Sequence[str] | str, partition_id: str, select_fields: Sequence[str] | None = None
    ) -> TensorDict:
        """Rows as a TensorDict, in the order of `keys`. A selected field that no row has is left out, as there.

        Raises:
            KeyError: an unknown key, or a field that some of the rows have and others lack.
        """
        rows = [self._rows[partition_id][key] for key in ([keys] if isinstance(keys, str) else keys)]
        wanted = dict.fromkeys(name for row in rows for name in row) if select_fields is None else select_fields
        names = [name for name in wanted if any(name in row for row in rows)]
        return TensorDict({name: join_column([row[name] for row in rows]) for name in names}, batch_size=len(rows))

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, Tag]]:
        """A copy of all tags by partition and key."""
        return copy.deepcopy({p: tags for p, tags in self._tags.items() if partition_id in (None, p)})

    def kv_clear(self, keys: Sequence[str] | str, partition_id: str) -> None:
        """Forget rows; unknown keys are no error, as in TransferQueue."""
        gone = [keys] if isinstance(keys, str) else list(keys)
        self.before_clear(gone, partition_id)
        for key in gone:
            self._tags[partition_id].pop(key, None)
            self._rows[partition_id].pop(key, None)

    def init(self, conf: Any = None) -> None:
        """Nothing to start."""

    async def async_kv_put(self, **kwargs: Any) -> None:
        """As kv_put; verl's agent loop awaits it."""
        self.kv_put(**kwargs)

    async def async_kv_batch_put(self, **kwargs: Any) -> KVBatchMeta:
        """As kv_batch_put; verl's agent loop awaits it."""
        return self.kv_batch_put(**kwargs)
