"""Settings that run but train little or nothing, where knowing it takes the data, the model or the step count.

What the settings alone show is refused when the config is read (config.rules). Pure functions. Not here: batches
(plan.py) and memory (budget.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from quickstart.arguments import PREFERENCE_TYPES, RunConfig
from quickstart.doctor.finding import Finding, error, note, ok, warning
from quickstart.doctor.parameters import ModelShape, millions
from quickstart.doctor.plan import BatchPlan
from quickstart.doctor.rows import Lengths, share
from quickstart.words import counted

CHECK = "settings"
BIG = 100_000_000  # parameters; below that, models take larger steps
FULL_RATE, LORA_RATE = 1e-5, 1e-3  # learning rates above which models of that size usually break
SMALL_RATE = 1e-2  # the same for smaller models
PREFERENCE_RATE = 1e-5
TYPICAL_WEIGHT = 0.02  # standard deviation that transformers draws weights with
BFLOAT_STEP = 2**-8  # relative distance of neighbouring bfloat16 numbers


@dataclass(frozen=True, kw_only=True)
class Known:
    """What the rules may look at. shape: None where it could not be read."""

    cfg: RunConfig
    plan: BatchPlan
    lengths: Lengths
    shape: ModelShape | None


def judge_settings(known: Known) -> list[Finding]:
    """All rules; one line that says so where none has anything to say."""
    findings = [finding for rule in RULES for finding in rule(known)]
    return findings or [ok(CHECK, "none that runs but trains nothing")]


def answer_room(known: Known) -> Iterator[Finding]:
    """A limit that the rows' own answers do not fit into, so that no answer can finish."""
    cfg, answers = known.cfg, known.lengths.answers
    if not answers:
        return
    limit, field = cfg.data.max_response_length, "data.max_response_length"
    long = sum(length > limit for length in answers)
    most = share(answers, 0.99)
    fix = f"set data.max_response_length={most}, which 99% of them fit into"
    found = f"{counted(limit, 'token')}, and {long} of {len(answers)} chosen answers are longer"
    if long == len(answers):
        rule = f"no answer like these could finish; the shortest has {min(answers)} tokens"
        yield error(CHECK, found, fix, field=field, rule=rule)
    elif long > len(answers) / 2:
        yield warning(CHECK, found, fix, field=field, rule="most answers like these would be cut off")
    elif long > len(answers) / 10:
        yield note(CHECK, found, fix, field=field)


def warm_up(known: Known) -> Iterator[Finding]:
    """The first step of a warm-up has learning rate 0 (LambdaLR from 0; verl rounds down, transformer_impl.py:515)."""
    ratio, steps = known.cfg.rl.warmup_ratio, known.plan.steps
    climbing = int(ratio * steps)
    if climbing < 1:
        return
    field, found = (
        "rl.warmup_ratio",
        f"{ratio:g} of {counted(steps, 'step')}: {counted(climbing, 'step')} of climbing, the first at 0",
    )
    if steps <= 2 or climbing >= steps:
        rule = f"with {counted(steps, 'step')} in all, little or nothing would change"
        yield error(CHECK, found, "write 0 for a short run", field=field, rule=rule)
    elif steps < 10:
        yield note(CHECK, found, "write 0 for a short run", field=field)


def large_rate(known: Known) -> Iterator[Finding]:
    """Learning rates at which models of that size usually break."""
    cfg, shape = known.cfg, known.shape
    if shape is None:
        return
    usual = PREFERENCE_RATE if cfg.rl.rl_type in PREFERENCE_TYPES else FULL_RATE
    limit = LORA_RATE if cfg.model.lora_rank else usual
    limit = limit if shape.parameters >= BIG else SMALL_RATE
    rate = cfg.rl.learning_rate
    if rate > limit:
        rule = f"large for {millions(shape.parameters)} parameters{' in LoRA' if cfg.model.lora_rank else ''}"
        fix = f"write {limit:g} or less; a spike of KL or of the gradient norm is the sign"
        yield warning(CHECK, f"{rate:g}", fix, field="rl.learning_rate", rule=rule)


def small_rate(known: Known) -> Iterator[Finding]:
    """An engine in bfloat16 sees weights only when they have moved by half a bfloat16 step; the master copy is float32.

    Adam moves a weight by about the learning rate in one update.
    """
    cfg, plan = known.cfg, known.plan
    if cfg.model.torch_dtype != "bfloat16" or cfg.rl.rl_type in PREFERENCE_TYPES or cfg.model.lora_rank:
        return
    updates = plan.steps * plan.updates_per_step
    moved, needed = cfg.rl.learning_rate * updates, TYPICAL_WEIGHT * BFLOAT_STEP / 2
    if moved < needed:
        found = f"{cfg.rl.learning_rate:g} x {updates} updates moves a weight by {moved:.1g} at most"
        rule = f"rollouts in bfloat16 see typical weights ({TYPICAL_WEIGHT}) only after {needed:.1g}"
        fix = (
            "more steps, or a larger learning rate, to see the rewards move; the float32 master weights learn all along"
        )
        yield note(CHECK, found, fix, field="rl.learning_rate", rule=rule)


def filtered_sampling(known: Known) -> Iterator[Finding]:
    """Log-probs of filtered sampling are those of another distribution than the policy's."""
    rl = known.cfg.rl
    if rl.rl_type not in PREFERENCE_TYPES and (rl.top_p < 1 or rl.top_k > 0):
        found = f"top_p {rl.top_p:g}, top_k {rl.top_k}: answers are drawn from another distribution than is trained"
        fix = "write rl.top_p=1 rl.top_k=-1 for training; a negative KL is the sign"
        yield note(CHECK, found, fix, field="rl.top_p" if rl.top_p < 1 else "rl.top_k")


def small_groups(known: Known) -> Iterator[Finding]:
    """With 2 answers a prompt, most groups of a two-valued reward are all equal and teach nothing."""
    plan = known.plan
    if plan.answers_per_prompt in (2, 3):
        found = (
            f"{plan.answers_per_prompt} answers a prompt: where all of them score the same, the prompt teaches nothing"
        )
        yield note(CHECK, found, "write 4 or more; watch training/dead_group_share", field="rl.num_generations")


def nothing_kept(known: Known) -> Iterator[Finding]:
    """A run whose model is gone at its end."""
    if known.cfg.training.save_steps == "never":
        found = "never: the trained model will not be kept"
        yield note(CHECK, found, "write end to keep it", field="training.save_steps")


RULES: tuple[Callable[[Known], Iterator[Finding]], ...] = (
    answer_room,
    warm_up,
    large_rate,
    small_rate,
    filtered_sampling,
    small_groups,
    nothing_kept,
)
