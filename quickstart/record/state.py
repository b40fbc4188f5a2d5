"""trainer_state.json in the shape of Hugging Face's TrainerState: their tools and everybody's notebooks read it.

log_history has one entry a step: step, epoch, the plain names (reward, kl, actor_loss, critic_loss), then verl's own
metric names. A value that is not finite is null, and named under `nonfinite` in its entry.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quickstart.writing import to_json, without_nonfinite, write_atomic

# plain name -> verl's metric names, the first that is there counts.
PLAIN_NAMES: dict[str, tuple[str, ...]] = {
    "reward": ("critic/score/mean", "critic/rewards/mean"),  # before a KL penalty, if there is one
    "actor_loss": ("actor/pg_loss",),
    "critic_loss": ("critic/vf_loss",),
    # policy against reference model where KL is charged, else policy against itself before the update
    "kl": ("actor/reward_kl_penalty", "actor/kl_loss", "actor/ppo_kl"),
}
CHEAP_CHARACTERS = 1_000_000  # a file up to this size is rewritten after every step
WRITING_SHARE = 0.02  # of the run's time, at most, goes into rewriting a larger one


class TrainerState:
    """Grows by one entry a step and rewrites its file. `save` at the end is always complete.

    Rewriting costs more with every step (15 ms at 1,000 steps of 80 metrics, 0.2 s at 10,000), so a long run skips
    rewrites to keep them below WRITING_SHARE of its time.
    """

    def __init__(
        self, path: Path, *, max_steps: int, num_train_epochs: int, settings: Mapping[str, int | None]
    ) -> None:
        self._path = path
        self._head: dict[str, Any] = {
            "epoch": 0.0,
            "global_step": 0,
            "max_steps": max_steps,
            "num_train_epochs": num_train_epochs,
            **{name: value for name, value in settings.items() if value is not None},
        }
        self._entries: list[str] = []  # already JSON, so that an old entry is not encoded again each step
        self._characters = 0
        self._cost_s = 0.0
        self._saved_at = float("-inf")
        self.nonfinite: dict[str, int] = {}  # metric -> how often it was not finite

    def add(self, step: int, epoch: float, metrics: Mapping[str, Any]) -> list[str]:
        """Append one entry and write if it is cheap enough. Gives the names that were not finite."""
        clean, lost = without_nonfinite({**plain_metrics(metrics), **metrics})
        for name in lost:
            self.nonfinite[name] = self.nonfinite.get(name, 0) + 1
        entry = {"step": step, "epoch": round(epoch, 6), **clean, **({"nonfinite": lost} if lost else {})}
        self._append(entry)
        self._head.update(epoch=round(epoch, 6), global_step=step)
        is_cheap = self._characters < CHEAP_CHARACTERS
        if is_cheap or time.monotonic() - self._saved_at >= self._cost_s / WRITING_SHARE:
            self.save()
        return lost

    def add_evaluation(self, step: int, epoch: float, metrics: Mapping[str, Any]) -> None:
        """An entry of its own, as Hugging Face's trainers write their evaluations."""
        clean, lost = without_nonfinite(metrics)
        entry = {"step": step, "epoch": round(epoch, 6), **clean, **({"nonfinite": lost} if lost else {})}
        self._append(entry)
        self.save()

    def set_max_steps(self, max_steps: int) -> None:
        """Known when the data has been read."""
        self._head["max_steps"] = max_steps

    def load(self, entries: list[dict[str, Any]]) -> None:
        """Take over the history of the run that is resumed."""
        for entry in entries:
            self._append(entry)

    def save(self, *, durable: bool = False) -> None:
        """Write the file now."""
        began = time.monotonic()
        write_atomic(self._path, self._text(), durable=durable)
        self._saved_at = time.monotonic()
        self._cost_s = self._saved_at - began

    def _append(self, entry: dict[str, Any]) -> None:
        self._entries.append(textwrap.indent(to_json(entry, indent=2), "    "))
        self._characters += len(self._entries[-1])

    def _text(self) -> str:
        history = "[\n" + ",\n".join(self._entries) + "\n  ]" if self._entries else "[]"
        fields = {**DEFAULTS, **self._head}
        lines = [f'  "{name}": {to_json(value)}' for name, value in fields.items()]
        return "{\n" + ",\n".join([*lines, f'  "log_history": {history}']) + "\n}\n"


# The rest of transformers.TrainerState (transformers/trainer_callback.py), which loads the file with cls(**json).
# eval_steps and save_steps are 0 for never and for the end alone. Not here: tokens and flops, which nobody counts.
DEFAULTS: dict[str, Any] = {
    "best_global_step": None,
    "best_metric": None,
    "best_model_checkpoint": None,
    "eval_steps": 0,
    "is_hyper_param_search": False,
    "is_local_process_zero": True,
    "is_world_process_zero": True,
    "logging_steps": 1,
    "save_steps": 0,
    "train_batch_size": None,
    "trial_name": None,
    "trial_params": None,
}


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The newcomer's names for what is there."""
    plain: dict[str, Any] = {}
    for name, sources in PLAIN_NAMES.items():
        source = next((source for source in sources if source in metrics), None)
        if source is not None and name not in metrics:
            plain[name] = metrics[source]
    return plain
