"""One file's rows with what the loss reads beside them: reference log-probs, labels, and kto's KL estimate.

Not here: the cache of reference log-probs (preference_reference.py), the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from quickstart.trainers.preference_batches import Encoded, TokenRow, block_edges, rotate
from quickstart.trainers.preference_objective import KL, LABEL, REFERENCE, ROW, Objective, averages

LogProbs = Callable[[Sequence[TokenRow]], torch.Tensor]


def visited(plan: Sequence[Sequence[int]], group: int) -> list[int]:
    """Rows that a run trains on, in ascending order."""
    units = {unit for step in plan for unit in step}
    return [unit * group + i for unit in sorted(units) for i in range(group)]


class Split:
    """The rows of one file.

    Args:
        data: rows as tokens.
        objective: says what is needed.
        block: rows of a KL estimate.
        log_probs: rows -> (rows,) under the weights of now.
        reference: the same under the starting weights; called at once, before any weight moves. It is also given a
            word for what the rows are.
        used: rows that will be asked for; None: all.
    """

    def __init__(
        self,
        data: Encoded,
        objective: Objective,
        *,
        block: int,
        log_probs: LogProbs,
        reference: Callable[[Sequence[TokenRow], str], torch.Tensor],
        used: Sequence[int] | None = None,
    ) -> None:
        self.rows = data.rows
        self._data, self._objective, self._block, self._log_probs = data, objective, block, log_probs
        wanted = list(range(len(self.rows))) if used is None else list(used)
        self._reference = torch.zeros(len(self.rows), dtype=torch.float64)
        self._kl_reference = torch.zeros(len(self.rows), dtype=torch.float64)
        self._mismatched: list[TokenRow] = []
        if objective.uses_reference:
            self._reference[wanted] = reference([self.rows[i] for i in wanted], "answers")
        if objective.uses_kl:
            self._mismatched = rotate(self.rows, block)
            self._kl_reference[wanted] = reference([self._mismatched[i] for i in wanted], "mismatched answers")

    def index(self, units: Sequence[int]) -> list[int]:
        """Row numbers of pairs, or of rows."""
        return [unit * self._data.group + i for unit in units for i in range(self._data.group)]

    def columns(self, index: Sequence[int]) -> dict[str, torch.Tensor]:
        """What the loss reads beside log-probs, kto's KL estimate under the weights of now included. (rows,) each."""
        columns = {
            ROW: torch.tensor(index),
            LABEL: torch.tensor([int(self._data.labels[i]) for i in index]),
            REFERENCE: self._reference[list(index)],
        }
        return columns | {KL: self.kl(index)} if self._objective.uses_kl else columns

    def kl(self, index: Sequence[int]) -> torch.Tensor:
        """KTO's KL estimate of each row: the mean over its block, never below 0. (rows,)

        Unlike TRL's it does not depend on the number of devices: a block is per_device_train_batch_size rows.
        """
        ratio = self._log_probs([self._mismatched[i] for i in index]) - self._kl_reference[list(index)]
        edges = block_edges(len(index), self._block)
        means = [ratio[a:b].mean().clamp(min=0).expand(b - a) for a, b in pairwise(edges)]
        return torch.cat(means)

    def measure(self) -> dict[str, float]:
        """Loss and metrics of all rows under the weights of now."""
        columns = self.columns(list(range(len(self.rows))))
        lengths = torch.tensor([len(row.answer) for row in self.rows], dtype=torch.float64)
        loss, metrics = self._objective(self._log_probs(self.rows), lengths, columns)
        return {"loss": loss.item()} | averages({name: value.tolist() for name, value in metrics.items()})
