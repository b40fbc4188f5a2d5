"""What every trainer shares with the rest of a run: whom it tells, how it is stopped, when it stops by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from quickstart.errors import Fault, RunError

NON_FINITE_LIMIT = 3  # updates in a row that verl skipped (transformer_impl.py:822) before the run is stopped
SCALE_FLOOR = 2.0**4  # a loss scale this far below float16's usual 2**16 has done all that it can


class Reporter(Protocol):
    """What a trainer tells about a run; `record.Recorder` writes it down."""

    def phase(self, text: str) -> None: ...
    def rollout(self, step: int, rows: list[dict[str, Any]]) -> None: ...
    def update(self, step: int, epoch: float, metrics: dict[str, float]) -> None: ...
    def evaluation(self, step: int, epoch: float, metrics: dict[str, float], rows: list[dict[str, Any]]) -> None: ...
    def saved(self, step: int, path: Path) -> None: ...


class StopRequested(Exception):  # noqa: N818  (not an error)
    """The user asked to stop; raised between two steps, with everything of the last one recorded."""


class Scaler(Protocol):
    """torch's gradient scaler, as far as it is asked."""

    def get_scale(self) -> float: ...


class GradientWatch:
    """Ends a run whose gradients stay non-finite. verl skips each such update in silence.

    In float16 the loss is scaled by 65,536 at first, and where that is too much for a model's gradients the scaler
    skips the update and halves the scale: told once a step, and no fault until the scale has come down to SCALE_FLOOR.
    A loss that is itself not finite is not the scale's doing, and counts in any precision.

    Args:
        names: metrics that hold gradient norms, each with the one that holds the loss.
        remedy: what the user can do.
        scaler: of the engine behind a norm; None: it has none.
        tell: told of an update that a scaler has skipped.
    """

    def __init__(
        self,
        names: Mapping[str, str],
        remedy: str,
        scaler: Callable[[str], Scaler | None] = lambda _: None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._names, self._remedy = names, remedy
        self._scaler, self._tell = scaler, tell
        self._skipped = 0
        self._began = False

    def look(self, step: int, metrics: Mapping[str, float]) -> None:
        """After each step. Raises RunError after NON_FINITE_LIMIT skipped updates in a row."""
        if not self._began:
            self._began = True
            self._look_at_the_start(step, metrics)
        norms = {name: metrics[name] for name in self._names if name in metrics}
        broken = {name: norm for name, norm in norms.items() if not math.isfinite(norm)}
        scales = {name: self._searching(name, metrics) for name in broken}
        for name, scale in scales.items():
            if scale is not None:
                self._tell(f"Step {step}: update skipped, {name} not finite in float16; loss scale now {scale:g}")
        if broken and None not in scales.values():
            return  # neither a fault nor a sign that there is none
        self._skipped = self._skipped + 1 if broken else 0
        if self._skipped >= NON_FINITE_LIMIT:
            raise RunError(
                Fault(
                    field=f"step {step}: {', '.join(broken)}",
                    found=", ".join(str(norm) for norm in broken.values()),
                    rule=f"gradients were not finite in {NON_FINITE_LIMIT} steps in a row; verl skips such updates",
                    fix=self._remedy,
                )
            )

    def _look_at_the_start(self, step: int, metrics: Mapping[str, float]) -> None:
        """A loss that is not finite before anything was learned comes from the weights or the data, and will stay."""
        losses = {name: metrics[name] for name in self._names.values() if not math.isfinite(metrics.get(name, 0.0))}
        if losses:
            raise RunError(
                Fault(
                    field=f"step {step}: {', '.join(losses)}",
                    found=", ".join(str(loss) for loss in losses.values()),
                    rule="the loss is not a finite number before the first update was made",
                    fix="look at the model's weights (a NaN among them?), or set model.torch_dtype=float32",
                )
            )

    def _searching(self, name: str, metrics: Mapping[str, float]) -> float | None:
        """The scale that a scaler goes on with, where that alone can have been the trouble."""
        scaler = self._scaler(name)
        if scaler is None or not math.isfinite(metrics.get(self._names[name], 0.0)):
            return None
        scale = scaler.get_scale()
        return scale if scale >= SCALE_FLOOR else None


class RewardWatch:
    """Says when rewards cannot teach: all equal for the first steps, or equal inside nearly every group.

    Args:
        tell: told each of the two at most once.
    """

    STEPS = 3  # a constant reward is certain after so many
    DEAD = 0.8  # share of groups without a difference; their advantages are 0

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._seen: set[float] = set()
        self._steps = 0
        self._told_dead = False

    def look(self, rewards: Sequence[float], dead_share: float) -> None:
        """After each rollout: its rewards, and the share of prompts whose answers all got the same."""
        self._steps += 1
        if self._steps <= self.STEPS:
            self._seen.update(rewards)
        if self._steps == self.STEPS and len(self._seen) == 1:
            value = f"{next(iter(self._seen)):.3g}"
            self._tell(
                f"Warning: the reward was {value} for every answer of the first {self.STEPS} steps; nothing can be "
                "learned from it. To do: let it depend on the answer"
            )
        if dead_share > self.DEAD and not self._told_dead:
            self._told_dead = True
            self._tell(
                f"Warning: in {dead_share:.0%} of the groups all answers got the same reward, so they teach nothing. "
                "To do: a larger rl.num_generations, a finer reward, or prompts that are neither too easy nor too hard"
            )
