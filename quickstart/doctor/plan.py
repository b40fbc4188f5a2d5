"""The batch arithmetic of a run, multiplied out: what one step takes, how many there are, what is left over.

Pure functions of settings and the number of rows. What does not divide is refused by config.rules; this says what the
sizes mean. Not here: memory (memory.py).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from quickstart.arguments import PREFERENCE_TYPES, RunConfig
from quickstart.config import fewer_rows, generations, samples_per_step, samples_per_update
from quickstart.doctor.finding import Finding, error, note, ok
from quickstart.words import counted

CHECK = "batch plan"


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """One run in numbers. A sample is a prompt with one answer; for dpo and its like, a row with its pair."""

    rows: int  # training rows
    rows_per_step: int  # prompts of a rollout; rows of an update where nothing is generated
    answers_per_prompt: int  # 1 where nothing is generated
    samples_per_step: int
    samples_per_update: int  # verl's mini batch, counted in samples over all devices
    samples_at_a_time: int  # verl's micro batch: one forward and backward on one device
    accumulation: int  # passes added up for one update
    updates_per_step: int
    steps_per_epoch: int
    steps: int  # of the whole run

    @property
    def rows_left_over(self) -> int:
        """Rows of each epoch that fill no step (another choice each epoch, where rows are shuffled)."""
        return self.rows - self.steps_per_epoch * self.rows_per_step

    @property
    def epochs(self) -> float:
        """Passes over the data."""
        return self.steps / self.steps_per_epoch if self.steps_per_epoch else 0.0


def batch_plan(cfg: RunConfig, rows: int) -> BatchPlan:
    """The numbers of a run with `rows` training rows. cfg: legal by config.rules; "auto" may still be in it."""
    rl, update = cfg.rl, samples_per_update(cfg)
    prefers = rl.rl_type in PREFERENCE_TYPES
    rows_per_step = update if prefers else rl.rollout_batch_size
    per_epoch = rows // rows_per_step
    return BatchPlan(
        rows=rows,
        rows_per_step=rows_per_step,
        answers_per_prompt=1 if prefers else generations(cfg),
        samples_per_step=samples_per_step(cfg),
        samples_per_update=update,
        samples_at_a_time=rl.per_device_train_batch_size,
        accumulation=rl.gradient_accumulation_steps,
        updates_per_step=1 if prefers else samples_per_step(cfg) // update * rl.ppo_epochs,
        steps_per_epoch=per_epoch,
        steps=cfg.training.max_steps or per_epoch * rl.num_train_epochs,
    )


def sizes_near(wanted: int, rows: int) -> list[int]:
    """Step sizes that leave no row over: the nearest below and above `wanted` that divide the rows."""
    divisors = [size for size in range(1, rows + 1) if rows % size == 0]
    below = [size for size in divisors if size <= wanted][-1:]
    above = [size for size in divisors if size > wanted][:1]
    return below + above


def judge_batches(cfg: RunConfig, plan: BatchPlan) -> list[Finding]:
    """Enough rows for a step, and what remains of an epoch."""
    prefers = cfg.rl.rl_type in PREFERENCE_TYPES
    field = "rl.gradient_accumulation_steps" if prefers else "rl.rollout_batch_size"
    if plan.rows < plan.rows_per_step:
        found = f"{counted(plan.rows_per_step, 'row')} for a step, with {counted(plan.rows, 'row')} of data"
        rule = "a step must not need more rows than there are"
        return [error(CHECK, found, fewer_rows(cfg, plan.rows), field=field, rule=rule)]
    sizes = ok(CHECK, batch_words(plan, cfg))
    findings = [dataclasses.replace(sizes, data=dataclasses.asdict(plan))]
    if plan.rows_left_over:
        near = " or ".join(str(size) for size in sizes_near(plan.rows_per_step, plan.rows))
        found = f"{plan.rows_left_over} of {plan.rows} rows are not used in an epoch: they do not fill a step"
        findings.append(note("batch plan", found, f"a step of {near} rows leaves none over", field=field))
    return findings


def batch_words(plan: BatchPlan, cfg: RunConfig) -> str:
    """As one sentence."""
    passes = f"{plan.samples_per_update} at once" if plan.accumulation == 1 else ""
    passes = passes or f"{plan.accumulation} passes of {plan.samples_per_update // plan.accumulation}"
    if cfg.rl.rl_type in PREFERENCE_TYPES:
        head = f"a step is one update of {counted(plan.rows_per_step, 'row')} ({passes})"
    else:
        head = (
            f"a step is {counted(plan.rows_per_step, 'prompt')} x {plan.answers_per_prompt} = "
            f"{counted(plan.samples_per_step, 'answer')}, "
            f"{counted(plan.updates_per_step, 'update')} of {plan.samples_per_update} ({passes})"
        )
    epochs = "1 epoch" if plan.epochs == 1 else f"{plan.epochs:.2g} epochs"
    return f"{head}; {counted(plan.steps_per_epoch, 'step')} an epoch, {plan.steps} in all ({epochs})"
