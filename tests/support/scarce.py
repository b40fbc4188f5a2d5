"""Memory that runs out where a test wants it, on a machine that has enough."""

from __future__ import annotations

from typing import Any

import torch


class Memory:
    """In an engine's place before its forward passes: memory runs out in those of the given numbers."""

    def __init__(self, engine: Any, *failing: int, forward_only: bool = False) -> None:
        self._original, self._failing, self._forward_only = engine.forward_step, failing, forward_only
        self.rows: list[int] = []
        engine.forward_step = self

    def __call__(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        if forward_only == self._forward_only:
            self.rows.append(len(micro_batch))
            if len(self.rows) in self._failing:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return self._original(micro_batch, loss_function, forward_only)
