"""The trainer tells what happened; this writes it to the console and to every file of a run.

recorder = Recorder(outputs, cfg, capture, choices=choices, argv=argv)
recorder.begin(max_steps)
recorder.phase("loading model ...")
recorder.rollout(step, rows); recorder.update(step, epoch, metrics); recorder.saved(step, path)
recorder.close("completed")
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quickstart.arguments import CRITIC_TYPES, PREFERENCE_TYPES, RunConfig, algorithm_name
from quickstart.config import Choice, to_yaml
from quickstart.outputs import OutputFolder
from quickstart.record.capture import Capture
from quickstart.record.console import Console, aligned
from quickstart.record.rollouts import write_rollouts
from quickstart.record.run_record import now, start_facts
from quickstart.record.state import TrainerState, plain_metrics
from quickstart.record.tensorboard import EventFile
from quickstart.words import counted
from quickstart.writing import write_atomic

SAMPLES = 3
# What an update line shows: words -> metric names, the first that is there counts.
PREFERENCE_WORDS = {"margin": "rewards/margins", "accuracy": "rewards/accuracies", "kl": "kl"}


class Recorder:
    """One run's console lines, rollouts, trainer_state.json, TensorBoard events, config.yaml and run.json."""

    def __init__(
        self,
        outputs: OutputFolder,
        cfg: RunConfig,
        capture: Capture,
        *,
        choices: Sequence[Choice] = (),
        argv: Sequence[str] = (),
    ) -> None:
        self._outputs, self._cfg = outputs, cfg
        self.console = Console(capture)
        self._events: EventFile | None = None
        self._state = TrainerState(
            outputs.trainer_state,
            max_steps=cfg.training.max_steps or 0,
            num_train_epochs=cfg.rl.num_train_epochs,
            settings=state_settings(cfg),
        )
        self._max_steps = 0
        self.step = 0  # the last one that was finished
        self.last_metrics: dict[str, Any] = {}  # its metrics, plain names among them
        self._closed = False
        self._rewards: list[float] = []  # mean of each step
        self._samples_only = cfg.rl.rl_type in PREFERENCE_TYPES
        self._last_rows: Sequence[Mapping[str, Any]] = ()
        write_atomic(outputs.config, to_yaml(cfg))
        outputs.update_run(**start_facts(cfg, choices, argv), exit_reason="running")

    def fact(self, **facts: Any) -> None:
        """Add to run.json what shows only on the way: data_sha256=..., num_train=..."""
        self._outputs.update_run(**facts)

    def settings(self, choices: Sequence[Choice]) -> None:
        """The table of what was chosen, and what was understood differently than written."""
        self.console.block(settings_text(self._cfg, choices))

    def begin(self, max_steps: int, history: Sequence[dict[str, Any]] = ()) -> None:
        """Training starts: the number of steps is known now. history: log_history of the run that is resumed."""
        self._max_steps = max_steps
        self._state.load(list(history))
        self._state.set_max_steps(max_steps)
        self._state.save()
        self._events = EventFile(self._outputs.tensorboard / time.strftime("%Y-%m-%d_%H-%M-%S"))
        self.console.begin(max_steps)

    def phase(self, text: str) -> None:
        """One line: loading model, initialising actor and critic, ..."""
        self.console.line(text)

    def rollout(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Answers of one step with their rewards. Always written; told at logging steps.

        A method without rollouts hands in samples: before training as those of step 1, after it as those of one more
        step than there are.
        """
        write_rollouts(self._outputs.rollout_file(step), rows)
        rewards = [float(row["reward"]) for row in rows]
        self._rewards.append(statistics.fmean(rewards))
        first = "Answers of the first step"
        if self._samples_only:
            first = samples_name(step)
            self.console.line(samples_line(step, rewards))
        elif self._is_told(step):
            prompts = len({row["uid"] for row in rows})
            self.console.line(
                f"Step {step}: rollout completed ({counted(prompts, 'prompt')} -> {counted(len(rows), 'response')})"
            )
            spread = statistics.pstdev(rewards)
            self.console.line(f"Step {step}: reward computed (avg {self._rewards[-1]:.2f}, std {spread:.2f})")
        if not self._last_rows:
            self.console.samples(f"{first}: best, middle and worst", pick(rows))
        self._last_rows = rows

    def update(self, step: int, epoch: float, metrics: Mapping[str, Any]) -> None:
        """Metrics of one finished step, under verl's names."""
        assert self._events is not None, "begin() comes first"
        self.step, self.last_metrics = step, {**plain_metrics(metrics), **metrics}
        lost = self._state.add(step, epoch, metrics)
        self._events.scalars(step, self.last_metrics)
        if lost:
            self.console.line(f"Step {step}: not finite, recorded as null: {', '.join(lost)}")
        if self._is_told(step):
            self.console.line(update_line(step, self._cfg.rl.rl_type, metrics))
        self.console.progress(step)

    def evaluation(
        self, step: int, epoch: float, metrics: Mapping[str, Any], rows: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Answers and metrics on the evaluation rows."""
        assert self._events is not None, "begin() comes first"
        found = dict(metrics)
        if rows:
            write_rollouts(self._outputs.evaluation_file(step), rows)
            found["eval_reward"] = statistics.fmean(float(row["reward"]) for row in rows)
        self._state.add_evaluation(step, epoch, found)
        self._events.scalars(step, found)
        shown = found.get("eval_reward", found.get("eval_loss"))
        word = "reward" if "eval_reward" in found else "loss"
        value = "" if shown is None else f": {word} {shown:.3f}"
        where = f" on {counted(len(rows), 'row')}" if rows else ""
        self.console.line(f"Step {step}: evaluation done{where}{value}")

    def saved(self, step: int, path: Path) -> None:
        """A checkpoint is complete."""
        self.console.line(f"Step {step}: checkpoint written to {path}")

    def close(self, exit_reason: str) -> None:
        """The run is over: completed, interrupted, or failed: WHY. Completes every file. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self.console.end()
        self._state.save(durable=True)
        if self._events:
            self._events.close()
        self._outputs.update_run(
            ended=now(), exit_reason=exit_reason, steps=self.step, nonfinite_values=self._state.nonfinite
        )
        if self.step > 1 and self._last_rows and not self._samples_only:
            self.console.samples("Answers of the last step: best, middle and worst", pick(self._last_rows))
        self.console.line(closing_line(exit_reason, self.step, self._change(), self._outputs))

    def _change(self) -> str:
        """The reward at the start and at the end; empty where there are not two."""
        if len(self._rewards) < 2:
            return ""
        what = "reward of the samples" if self._samples_only else "reward"
        return f", {what} {self._rewards[0]:.3f} -> {self._rewards[-1]:.3f}"

    def _is_told(self, step: int) -> bool:
        return step in (1, self._max_steps) or step % self._cfg.training.logging_steps == 0


def state_settings(cfg: RunConfig) -> dict[str, int | None]:
    """The settings that TrainerState repeats."""
    every = cfg.training.save_steps
    return {
        "logging_steps": cfg.training.logging_steps,
        "eval_steps": cfg.training.eval_steps,
        "save_steps": every if isinstance(every, int) else None,
        "train_batch_size": cfg.rl.per_device_train_batch_size,
    }


def pick(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Best, middle and worst by reward; fewer where there are fewer rows."""
    ranked = sorted(rows, key=lambda row: float(row["reward"]), reverse=True)
    places = sorted({0, len(ranked) // 2, len(ranked) - 1}) if ranked else []
    return [ranked[place] for place in places[:SAMPLES]]


def samples_name(step: int) -> str:
    """Of a method without rollouts: its samples at this step of `rollout`."""
    return f"Samples {'before' if step == 1 else 'after'} training"


def samples_line(step: int, rewards: Sequence[float]) -> str:
    """Samples before training: 8 greedy answers, average reward 0.32"""
    average = statistics.fmean(rewards)
    return f"{samples_name(step)}: {counted(len(rewards), 'greedy answer')}, average reward {average:.2f}"


def update_line(step: int, rl_type: str, metrics: Mapping[str, Any]) -> str:
    """Step 3: PPO update done. Loss: actor 0.01, critic 0.2, kl 0.001"""
    plain = {**plain_metrics(metrics), **metrics}
    if "actor_loss" in plain:
        words = {"actor": "actor_loss", **({"critic": "critic_loss"} if rl_type in CRITIC_TYPES else {}), "kl": "kl"}
        parts = [f"{word} {float(plain[name]):.3g}" for word, name in words.items() if name in plain]
    else:
        parts = [f"{float(plain['loss']):.3g}"] if "loss" in plain else []
        parts += [f"{word} {float(plain[name]):.3g}" for word, name in PREFERENCE_WORDS.items() if name in plain]
    return f"Step {step}: {algorithm_name(rl_type)} update done." + (f" Loss: {', '.join(parts)}" if parts else "")


def closing_line(exit_reason: str, steps: int, change: str, outputs: OutputFolder) -> str:
    """The last line of a run; after a failure it points to the log."""
    reason = (exit_reason.splitlines() or [""])[0][:160]
    word = "Training completed" if exit_reason == "completed" else f"Training ended early ({reason})"
    log = f"; the log of it all: {outputs.log}" if exit_reason.startswith("failed") else ""
    return f"{word}: {counted(steps, 'step')}{change}. Results are in {outputs.root}{log}"


def settings_text(cfg: RunConfig, choices: Sequence[Choice]) -> str:
    """Profile, every value that `auto` chose, and the notices, as a table."""
    rows = [("profile", cfg.source.profile, cfg.source.profile_why)] if cfg.source.profile else []
    rows += [(choice.field, str(choice.value), choice.why) for choice in choices]
    lines = ["chosen automatically:", aligned(rows)] if rows else []
    return "\n".join([*lines, *(f"note: {notice}" for notice in cfg.source.notices)])
