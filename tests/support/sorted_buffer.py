"""verl's replay buffer, giving the rows of a step in an order that no run can change. For parity runs.

verl trains on rows in the order in which they arrive from Ray; with several mini-batches a step the stock trainer is
then not equal to itself from run to run. Sorted by their tokens, rows stand in the same order on both backends.
Loaded by verl as `trainer.v1.sampler.custom_sampler`.
"""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1 import replay_buffer


class SortedBuffer(replay_buffer.ReplayBuffer):
    """Polls often, and sorts each batch by its token ids."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, poll_interval=0.05)

    def _materialize_batch(self, *args: Any) -> Any:
        batch = super()._materialize_batch(*args)
        # the module's own `tq`: TransferQueue in a stock run, our store in a local one
        rows = replay_buffer.tq.kv_batch_get(batch.keys, batch.partition_id, ["input_ids"])["input_ids"]
        tokens = [row.tolist() for row in rows.unbind()]
        batch.reorder(sorted(range(len(tokens)), key=tokens.__getitem__))
        return batch
