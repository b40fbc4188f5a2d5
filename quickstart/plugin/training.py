"""verl's TrainingWorker driven directly: token sequences in, log-probs or an optimizer step out. No Ray, no rollout.

What verl's SFT trainer is to answers, this is to preferences: the model, FSDP2 engine, optimizer, schedule, gradient
accumulation and checkpoints are verl's (workers/engine_workers.py:83, workers/engine/fsdp/transformer_impl.py). Beside
`verl_config` the place where its keys and batch fields are spelled. Not here: what is learned (the loss is given).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker

# (summed log-probs of the answers, tokens of the answers, other columns: (rows,) each)
# -> (mean loss over the rows, metrics of any length)
Columns = Mapping[str, torch.Tensor]
RowLoss = Callable[[torch.Tensor, torch.Tensor, Columns], tuple[torch.Tensor, Columns]]


class TokenRow(Protocol):
    """One prompt with one answer, as token ids."""

    @property
    def prompt(self) -> list[int]: ...
    @property
    def answer(self) -> list[int]: ...
    def __len__(self) -> int: ...


def jagged(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of different lengths as one nested tensor."""
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def pack(sequences: Sequence[TokenRow], columns: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> Any:
    """A batch as verl's engine reads it.

    Args:
        sequences: the rows.
        columns: (rows,) tensors that the loss reads.
        facts: values for the whole batch, under verl's names.
    """
    tensors = {
        "input_ids": jagged([torch.tensor(s.prompt + s.answer) for s in sequences]),
        "position_ids": jagged([torch.arange(len(s)) for s in sequences]),
        "loss_mask": jagged([torch.tensor([0] * len(s.prompt) + [1] * len(s.answer)) for s in sequences]),
        **columns,
    }
    return tu.get_tensordict(tensor_dict=tensors, non_tensor_dict=dict(facts))


def answer_sums(log_probs: torch.Tensor, loss_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each answer, summed over its tokens, and the number of these.

    Args:
        log_probs: jagged; entry t scores token t + 1, the last one of a row nothing (verl shifts labels by one).
        loss_mask: jagged; 1 where the token belongs to the answer.

    Returns:
        two (rows,) float64 tensors: a loss takes the difference of two sums of some hundreds, in float32 good to 3e-5.
    """
    offsets = log_probs.offsets()
    mask = torch.roll(loss_mask.values(), shifts=-1, dims=0) > 0
    row = torch.repeat_interleave(torch.arange(len(offsets) - 1, device=mask.device), offsets.diff())
    zeros = torch.zeros(len(offsets) - 1, dtype=torch.float64, device=mask.device)
    # where, not a product: a log-prob of -inf on a prompt's token must not turn the sum into NaN
    counted = torch.where(mask, log_probs.values().double(), 0.0)
    return zeros.index_add(0, row, counted), zeros.index_add(0, row, mask.double())


class Policy:
    """The model that is trained, behind verl's worker.

    Args:
        config: verl's whole configuration (verl_compose.compose): its `actor_rollout_ref.{model,actor}` are read.
        loss: of the rows of a micro batch; a mean over them.
        group: consecutive rows that must stay in one micro batch: 2 for pairs, else 1.
    """

    def __init__(self, config: Any, loss: RowLoss, group: int) -> None:
        part = config.actor_rollout_ref
        actor = omega_conf_to_dataclass(part.actor)
        engine = actor.engine
        engine.use_dynamic_bsz = part.actor.use_dynamic_bsz
        engine.max_token_len_per_gpu = part.actor.ppo_max_token_len_per_gpu
        engine.micro_batch_size_per_gpu = part.actor.ppo_micro_batch_size_per_gpu  # in groups
        self.model_config = omega_conf_to_dataclass(part.model)
        self.worker = TrainingWorker(
            TrainingWorkerConfig(
                model_type="language_model",
                model_config=self.model_config,
                engine_config=engine,
                optimizer_config=actor.optim,
                checkpoint_config=actor.checkpoint,
                profiler_config=None,
            )
        )
        self.worker.reset()
        self.worker.set_loss_fn(self._verl_loss)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._loss, self._group = loss, group
        self._columns: tuple[str, ...] = ()  # of the batch that is trained on

    @property
    def engine(self) -> Any:
        """verl's engine."""
        return self.worker.engine

    @property
    def module(self) -> torch.nn.Module:
        """The model; a plain one on one device."""
        return self.engine.module

    @property
    def learning_rate(self) -> float:
        """Of the next update."""
        return float(self.engine.lr_scheduler.get_last_lr()[0])

    @property
    def has_adapters(self) -> bool:
        """Whether LoRA adapters are trained, so that the model without them is the one that training started from."""
        return self.model_config.lora_rank > 0

    def log_probs(self, sequences: Sequence[TokenRow], *, tokens: int, base: bool = False) -> torch.Tensor:
        """Summed log-probs of the answers under the weights as they are, (rows,) float64 on the CPU.

        Sorted by length and cut into batches of like size, so that little is padding. Every rank computes its share.

        Args:
            tokens: most tokens of a batch, padding included; a longer sequence is a batch of its own.
            base: without LoRA adapters.
        """
        order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
        batches = list(length_batches(order, [len(s) for s in sequences], tokens))
        found: dict[int, float] = {}
        for turn in range(0, len(batches), self.ranks):
            # a sharded model needs all ranks in each forward: those without a batch of their own repeat the last one
            mine = batches[min(turn + self.rank, len(batches) - 1)]
            sums = self._infer([sequences[i] for i in mine], base)
            found.update(zip(mine, sums.tolist(), strict=True))
        values = [value for _, value in sorted(self._from_all(found).items())]
        return torch.tensor(values, dtype=torch.float64)

    def _infer(self, sequences: Sequence[TokenRow], base: bool) -> torch.Tensor:
        facts = {
            **self._facts(len(sequences)),
            "compute_loss": False,
            "no_lora_adapter": base and self.has_adapters,
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": len(sequences),
            "force_group_size": 1,
        }
        batch = pack(sequences, {}, facts)
        mask = batch["loss_mask"]
        return answer_sums(tu.get(self.worker.infer_batch(batch), "log_probs"), mask)[0]

    def _from_all(self, mine: dict[int, float]) -> dict[int, float]:
        if self.ranks == 1:
            return mine
        parts: list[Any] = [None] * self.ranks
        dist.all_gather_object(parts, mine)
        return {key: value for part in parts for key, value in part.items()}

    def update(self, sequences: Sequence[TokenRow], columns: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """One optimizer step over these rows, all ranks together; each rank takes its slice.

        Args:
            sequences: every rank's rows, in whole micro batches a rank.
            columns: (rows,) tensors that the loss reads.

        Returns:
            loss and grad_norm as numbers, the learning rate of this update as `learning_rate`, verl's memory figures,
            and the loss's metrics, as one list over all rows of all ranks.
        """
        count = len(sequences) // self.ranks
        assert len(sequences) % self.ranks == 0, "ranks must have the same number of rows"
        assert count % self._group == 0, "a group must not be split over ranks"
        mine = slice(self.rank * count, (self.rank + 1) * count)
        facts = {
            **self._facts(len(sequences) // self._group),
            "force_group_size": self._group,
            "update_lr_scheduler": True,
        }
        batch = pack(sequences[mine], {name: column[mine] for name, column in columns.items()}, facts)
        used, self._columns = self.learning_rate, tuple(columns)
        metrics = tu.get(self.worker.train_batch(batch), "metrics")
        metrics.pop("lr")  # of the next update
        lists = {name: flatten(value) for name, value in metrics.items() if isinstance(value, list)}
        return metrics | lists | {"learning_rate": used}

    def _facts(self, count: int) -> dict[str, Any]:
        tokenizer = self.model_config.tokenizer
        return {
            "pad_token_id": tokenizer.pad_token_id,
            "temperature": 1.0,
            "pad_mode": "no_padding",
            "global_batch_size": count,  # in groups, over all ranks
        }

    def _verl_loss(self, model_output: Any, data: Any, dp_group: Any = None) -> tuple[torch.Tensor, dict[str, Any]]:
        """Our loss with verl's signature and scale.

        verl adds up the losses of micro batches and averages gradients over ranks, so that a mean over a micro batch
        must be weighed by its share of the step.
        """
        columns = {name: data[name] for name in self._columns}
        loss, metrics = self._loss(*answer_sums(model_output["log_probs"], data["loss_mask"]), columns)
        share = len(data) / self._group / data["global_batch_size"]
        return loss * share * data["dp_size"], {name: value.tolist() for name, value in metrics.items()}

    def save(self, folder: Path) -> None:
        """verl's checkpoint: weights, optimizer, schedule, random state; one file a kind and rank."""
        self.worker.save_checkpoint(str(folder))

    def load(self, folder: Path) -> None:
        """Go on from such a checkpoint."""
        self.worker.load_checkpoint(str(folder))


def length_batches(order: Sequence[int], lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Cut row numbers, shortest row first, into batches of at most `tokens` places, padding included."""
    batch: list[int] = []
    for row in order:
        if batch and (len(batch) + 1) * lengths[row] > tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def flatten(values: list[Any]) -> list[float]:
    """Lists of lists of numbers, however deep (verl nests by rank and micro batch), as one list."""
    return [x for value in values for x in (flatten(value) if isinstance(value, list) else [value])]
