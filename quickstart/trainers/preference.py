"""DPO, KTO, SimPO and ORPO on verl's engine: the loop from the starting weights to the last checkpoint.

    data = encode(cfg, tokenizer, rows, eval_rows, positions)       # preference_data.py: faults of rows show here
    run_preference(cfg, data, tokenizer=tokenizer, steps=steps, ...)

What is trained on what is in `preference_batches`, the formulas in `losses`, the engine in `plugin/training.py`.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from quickstart import verl_compose, verl_config
from quickstart.arguments import RunConfig
from quickstart.outputs import MODEL_FOLDER
from quickstart.plugin import shims
from quickstart.plugin.retry import Halving, clear_end
from quickstart.plugin.training import Policy
from quickstart.trainers import environment
from quickstart.trainers.export import export_model
from quickstart.trainers.preference_batches import Encoded, TokenRow, steps_of
from quickstart.trainers.preference_data import PreferenceData
from quickstart.trainers.preference_objective import averages
from quickstart.trainers.preference_reference import WeightsDigest, reference_log_probs
from quickstart.trainers.preference_samples import Reward, Sampler, before_after, questions_of
from quickstart.trainers.preference_split import Split, visited
from quickstart.trainers.resume import checkpoints, reading, write_manifest
from quickstart.trainers.watch import GradientWatch, Reporter, StopRequested

# Tokens of a forward pass without gradients on a CPU: the caches hold this many; 8,192 take 2 to 3 times as long each.
CPU_TOKENS = 1024
REMEDY = "lower rl.learning_rate or rl.beta, or set model.torch_dtype=float32"


def run_preference(
    cfg: RunConfig,
    data: PreferenceData,
    *,
    tokenizer: Any,
    steps: int,
    folder: Path,
    cache: Path,
    reward: Reward,
    reporter: Reporter,
    stop: Callable[[], bool],
    chat_template: str | None = None,
    resume: Path | None = None,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """One whole run in this process. `environment.set_variables` has been called before verl was imported.

    Args:
        cfg: resolved settings; model names are local folders.
        chat_template: for a tokenizer without one.
        ready: called once models and reference log-probs are there, before the first step.
        others: see :class:`PreferenceTrainer`.

    Raises:
        UserError: a key of the `verl` section does not exist.
        StopRequested, RunError: see :meth:`PreferenceTrainer.fit`.
    """
    weights = WeightsDigest(Path(cfg.model.model_name_or_path))
    if data.objective.uses_reference:
        weights.begin()
    keys = verl_config.translate_preference(cfg, chat_template=chat_template, steps=steps)
    whole = verl_compose.compose_preference(keys, cfg.verl)
    halving = Halving(cfg.rl.per_device_train_batch_size, reporter.phase)
    undo = shims.install(str(cfg.training.device), halving=halving)
    try:
        environment.seed_everything(cfg.training.seed)
        with environment.process_group():
            with clear_end(lambda: "loading the model"):
                policy = Policy(whole, data.objective, data.objective.group)
            trainer = PreferenceTrainer(
                policy,
                cfg,
                data,
                tokenizer,
                steps=steps,
                folder=folder,
                cache=cache,
                reward=reward,
                reporter=reporter,
                stop=stop,
                resume=resume,
                weights=weights,
            )
            ready()
            with clear_end(lambda: f"step {trainer.global_step + 1}"):
                trainer.fit()
    finally:
        undo()


class PreferenceTrainer:
    """One run. Building it loads the model, computes reference log-probs, and goes back to a checkpoint, if any.

    Args:
        policy: the model under verl's engine, as it starts.
        cfg: resolved settings.
        data: rows as tokens.
        tokenizer: the policy's.
        steps: optimizer steps of the whole run.
        folder: for checkpoints.
        cache: folder for reference log-probs.
        reward: scores the samples.
        reporter: told what happens.
        stop: asked between two steps; True ends the run.
        resume: a checkpoint folder global_step_N of the same settings.
        weights: digest of the starting weights, perhaps begun already; default: begun when it is asked for.
    """

    def __init__(
        self,
        policy: Policy,
        cfg: RunConfig,
        data: PreferenceData,
        tokenizer: Any,
        *,
        steps: int,
        folder: Path,
        cache: Path,
        reward: Reward,
        reporter: Reporter,
        stop: Callable[[], bool],
        resume: Path | None = None,
        weights: WeightsDigest | None = None,
    ) -> None:
        self.policy, self.cfg, self.data, self.tokenizer = policy, cfg, data, tokenizer
        self.steps, self._folder, self._cache = steps, folder, cache
        self._reporter, self._stop = reporter, stop
        self._weights = weights or WeightsDigest(Path(cfg.model.model_name_or_path))
        scaler = getattr(policy.engine, "scaler", None)
        self._watch = GradientWatch({"grad_norm": "loss"}, REMEDY, lambda _: scaler, reporter.phase)
        self._block = cfg.rl.per_device_train_batch_size
        self._step_size = self._block * cfg.rl.gradient_accumulation_steps * policy.ranks
        self.plan = self._plan()
        self.train = self._split(data.train, visited(self.plan, data.train.group))
        self.evaluation = self._split(data.evaluation) if data.evaluation is not None else None
        self._sampler = self._make_sampler(reward) if policy.ranks == 1 else None
        self.global_step = 0
        if resume is not None:
            with reading(resume):
                policy.load(resume / "actor")
            self.global_step = int(resume.name.rsplit("_", 1)[1])

    def _plan(self) -> list[list[int]]:
        return steps_of(
            len(self.data.train),
            steps=self.steps,
            size=self._step_size,
            block=self._block if self.data.objective.uses_kl else 1,
            seed=self.cfg.training.seed if self.cfg.data.shuffle else None,
        )

    def _split(self, rows: Encoded, used: Sequence[int] | None = None) -> Split:
        return Split(
            rows,
            self.data.objective,
            block=self._block,
            log_probs=self.log_probs,
            reference=self.reference,
            used=used,
        )

    def _make_sampler(self, reward: Reward) -> Sampler:
        return Sampler(
            self.policy,
            self.tokenizer,
            questions_of(self.data.rows),
            reward,
            limit=self.cfg.data.max_response_length,
            max_prompt=self.cfg.data.max_prompt_length,
            autocast=getattr(torch, self.cfg.model.torch_dtype),
        )

    @property
    def rank_zero(self) -> bool:
        """Whether this process writes."""
        return self.policy.rank == 0

    def epoch(self, step: int) -> float:
        """Passes over the data after `step` steps."""
        return step / max(len(self.data.train) // self._step_size, 1)

    # ---- log-probs ----

    def log_probs(self, rows: Sequence[TokenRow], *, base: bool = False) -> torch.Tensor:
        """Of these answers under the weights of now; base: without adapters. (rows,)"""
        lengths = self.cfg.data.max_prompt_length + self.cfg.data.max_response_length
        tokens = self._block * self.data.objective.group * lengths  # what a training pass may hold at most
        if self.cfg.training.device == "cpu":
            tokens = min(tokens, CPU_TOKENS)
        return self.policy.log_probs(rows, tokens=tokens, base=base)

    def reference(self, rows: Sequence[TokenRow], what: str) -> torch.Tensor:
        """Of these answers under the starting weights, from the cache or computed now. (rows,)"""
        found, path, cached = reference_log_probs(
            rows,
            lambda wanted: self.log_probs(wanted, base=True),
            cache=self._cache,
            weights=self._weights.value(),
            facts={
                "dtype": str(self.cfg.model.torch_dtype),
                "device": str(self.cfg.training.device),
                "flash": str(self.cfg.model.use_flash_attention_2),
            },
            write=self.rank_zero,
        )
        source = f"read from {path}" if cached else f"computed and kept in {path}"
        self._reporter.phase(f"Reference log-probs of {len(rows)} {what} {source}")
        return found

    # ---- steps ----

    def step(self, step: int) -> dict[str, float]:
        """One update; step counts from 1. Gives its metrics."""
        began = time.perf_counter()
        units = self.plan[step - 1]
        index = self.train.index(units)
        metrics = self.policy.update([self.train.rows[i] for i in index], self.train.columns(index))
        seconds = time.perf_counter() - began
        tokens = sum(len(self.train.rows[i]) for i in index)
        numbers = {name: float(value) for name, value in metrics.items() if not isinstance(value, list)}
        numbers |= averages({name: value for name, value in metrics.items() if isinstance(value, list)})
        return numbers | {
            "actor/lr": numbers["learning_rate"],  # verl's name for it
            "perf/total_num_tokens": tokens,
            "perf/throughput": tokens / seconds,
            "timing_s/step": seconds,
            "training/global_step": step,
        }

    def evaluate(self, step: int) -> None:
        """Loss and rewards on the evaluation rows."""
        assert self.evaluation is not None
        metrics = {f"eval_{name}": value for name, value in self.evaluation.measure().items()}
        if self.rank_zero:
            self._reporter.evaluation(step, self.epoch(step), metrics, [])

    def sample(self, step: int) -> None:
        """Answers before step `step`, written as its rollout; the second time also the comparison."""
        if self._sampler is None:
            return
        before = self._sampler.first
        rows = self._sampler.rows(step)
        self._reporter.rollout(step, rows)
        if before:
            table = before_after(before, rows)
            self._reporter.phase(f"The same prompts before and after training (greedy answers):\n{table}")

    def save(self) -> None:
        """A checkpoint of this step, whole or not at all; the oldest ones beyond save_total_limit go."""
        folder = self._folder / f"global_step_{self.global_step}"
        part = folder.with_name(folder.name + ".part")
        if self.rank_zero:
            shutil.rmtree(part, ignore_errors=True)
        self.policy.save(part / "actor")
        export_model(self.policy.engine, self.tokenizer, part / MODEL_FOLDER, write=self.rank_zero)
        if not self.rank_zero:
            return
        write_manifest(part, self.cfg.rl.rl_type)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(part, folder)
        for old in checkpoints(self._folder.parent)[: -self.cfg.training.save_total_limit]:
            shutil.rmtree(old)
        self._reporter.saved(self.global_step, folder)

    def fit(self) -> None:
        """All steps that are left.

        Raises:
            StopRequested: `stop` said so; everything up to global_step is recorded and saved.
            RunError: gradients stayed non-finite, the reward failed, or memory ran out a second time.
        """
        if self.global_step == 0:
            self.sample(1)
            if self.cfg.training.eval_before_train:
                self.evaluate(0)
        while self.global_step < self.steps:
            if self._stop():
                if self.global_step and self.cfg.training.save_steps != "never":
                    self.save()
                raise StopRequested
            metrics = self.step(self.global_step + 1)
            self.global_step += 1
            if self.rank_zero:
                self._reporter.update(self.global_step, self.epoch(self.global_step), metrics)
            self._watch.look(self.global_step, metrics)
            self._after_step()
        self.sample(self.steps + 1)

    def _after_step(self) -> None:
        training, last = self.cfg.training, self.global_step == self.steps
        if self.evaluation is not None and (last or is_due(self.global_step, training.eval_steps)):
            self.evaluate(self.global_step)
        every = training.save_steps
        if every != "never" and (last or (every != "end" and is_due(self.global_step, every))):
            self.save()


def is_due(step: int, every: int | None) -> bool:
    """Whether something that happens every so many steps happens now. None: never."""
    return every is not None and step % every == 0
