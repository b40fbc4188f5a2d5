"""Rules across fields, as data. Each names what runs but is wrong, why, and the nearest legal value.

Ranges of single fields stand beside the fields in :mod:`quickstart.arguments`. Rules here see a whole RunConfig whose
single values are legal, with "auto" still in it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from quickstart.arguments import (
    GROUP_TYPES,
    PREFERENCE_TYPES,
    ROLLOUT_TYPES,
    SECTIONS,
    RunConfig,
    algorithm_name,
)
from quickstart.errors import Fault, UserError
from quickstart.words import counted

# What verl/trainer/ppo/v1/trainer_base.py:1743-1784 does not hand to these; tests/test_estimators.py.
NOT_IN_V1 = {
    "remax": "never computes the greedy baseline that ReMax subtracts",
    "gdpo": "keeps one reward an answer, and GDPO normalises several apart",
    "optimal_token_baseline": "never fetches sum_pi_squared, by which it weighs tokens",
    "tir_optimal_token_baseline": "never fetches sum_pi_squared, by which it weighs tokens",
}
VLLM_HOTTEST = 2.0  # vllm 0.24, SamplingParams
GROUP_SIZE = 4  # what num_generations "auto" means for the methods that compare answers within a group


def generations(cfg: RunConfig) -> int:
    """Answers per prompt, with "auto" understood."""
    wanted = cfg.rl.num_generations
    if wanted != "auto":
        return wanted
    return GROUP_SIZE if cfg.rl.rl_type in GROUP_TYPES else 1


def devices(cfg: RunConfig) -> int:
    """Devices that share a batch; "auto" is one until it is resolved."""
    return 1 if cfg.training.num_devices == "auto" else cfg.training.num_devices


def samples_per_update(cfg: RunConfig) -> int:
    """Samples (dpo: pairs) of one optimizer update over all devices."""
    return cfg.rl.per_device_train_batch_size * cfg.rl.gradient_accumulation_steps * devices(cfg)


def samples_per_step(cfg: RunConfig) -> int:
    """Answers of one rollout step; for preference types the pairs of one update."""
    if cfg.rl.rl_type in PREFERENCE_TYPES:
        return samples_per_update(cfg)
    return cfg.rl.rollout_batch_size * generations(cfg)


@dataclass(frozen=True)
class Rule:
    """field: where the fault is reported. broken: true when cfg must be refused. The rest are the message."""

    field: str
    broken: Callable[[RunConfig], bool]
    rule: Callable[[RunConfig], str]
    fix: Callable[[RunConfig], str]
    found: Callable[[RunConfig], str] | None = None  # None: the field's value
    also: tuple[str, ...] = ()  # other fields that it reads; a rule over a value that is itself wrong says nothing

    @property
    def reads(self) -> frozenset[str]:
        """All fields that decide."""
        return frozenset((self.field, "rl.rl_type", *self.also))


BATCH = (
    "rl.rollout_batch_size",
    "rl.num_generations",
    "rl.per_device_train_batch_size",
    "rl.gradient_accumulation_steps",
    "training.num_devices",
)


def rollout(cfg: RunConfig) -> bool:
    return cfg.rl.rl_type in ROLLOUT_TYPES


def update_splits_groups(cfg: RunConfig) -> bool:
    return rollout(cfg) and samples_per_update(cfg) % generations(cfg) != 0


def update_divides_step(cfg: RunConfig) -> bool:
    return samples_per_step(cfg) % samples_per_update(cfg) == 0


def batch_words(cfg: RunConfig) -> str:
    """The three factors of an update, multiplied out."""
    factors = f"{cfg.rl.per_device_train_batch_size} x {cfg.rl.gradient_accumulation_steps}"
    factors += f" x {devices(cfg)} devices" if devices(cfg) > 1 else ""
    return f"{factors} = {counted(samples_per_update(cfg), 'sample')} an update"


def legal_updates(cfg: RunConfig) -> list[int]:
    """Sizes of an update that divide a step, hold whole groups and fill all devices, in ascending order."""
    total, unit = samples_per_step(cfg), math.lcm(generations(cfg), devices(cfg))
    return [size for size in range(unit, total + 1, unit) if total % size == 0]


def split(size: int, micro: int, count: int) -> str:
    """An update size as the two settings, with a micro batch as near to the wanted one as it divides."""
    each = size // count
    best = max(m for m in range(1, each + 1) if each % m == 0 and m <= max(micro, 1))
    return f"rl.per_device_train_batch_size={best} rl.gradient_accumulation_steps={each // best}"


def nearest_batches(cfg: RunConfig) -> str:
    """Legal settings next to the wanted ones: update size below and above, or the rollout size that fits."""
    wanted, micro = samples_per_update(cfg), cfg.rl.per_device_train_batch_size
    sizes = legal_updates(cfg)
    below = [size for size in sizes if size <= wanted][-1:]
    above = [size for size in sizes if size > wanted][:1]
    ways = [split(size, micro, devices(cfg)) for size in below + above]
    unit = math.lcm(wanted, generations(cfg)) // generations(cfg)
    prompts = max(unit, round(cfg.rl.rollout_batch_size / unit) * unit)
    if wanted % generations(cfg) == 0:
        ways.append(f"rl.rollout_batch_size={prompts}")
    return "set " + ", or ".join(dict.fromkeys(ways)) if ways else "set rl.gradient_accumulation_steps=1"


def warms_up_for_nothing(cfg: RunConfig) -> bool:
    """verl's warm-up is int(ratio * steps) steps and starts at 0 (fsdp/transformer_impl.py:515)."""
    steps = cfg.training.max_steps
    return steps is not None and steps <= 2 and int(cfg.rl.warmup_ratio * steps) >= 1


RULES: tuple[Rule, ...] = (
    Rule(
        "rl.num_generations",
        lambda c: c.rl.rl_type in GROUP_TYPES and generations(c) < 2,
        lambda c: (
            f"{algorithm_name(c.rl.rl_type)} compares the answers to one prompt; with one answer the raw "
            "reward becomes the advantage"
        ),
        lambda c: f"write at least 2, for example {GROUP_SIZE}",
    ),
    Rule(
        "rl.rl_type",
        lambda c: c.rl.rl_type in NOT_IN_V1,
        lambda c: f"verl 0.9.1 registers this estimator, but its V1 trainer {NOT_IN_V1[c.rl.rl_type]}",
        lambda c: "use grpo, rloo or reinforce_plus_plus_baseline",
    ),
    Rule(
        "rl.per_device_train_batch_size",
        lambda c: c.rl.rl_type == "kto" and c.rl.per_device_train_batch_size < 2,
        lambda c: "KTO estimates the KL from the other answers of the batch, so a batch needs at least 2",
        lambda c: "write 2 or more",
    ),
    Rule(
        "rl.per_device_train_batch_size",
        lambda c: rollout(c) and samples_per_update(c) > samples_per_step(c),
        lambda c: (
            f"a step has only {counted(samples_per_step(c), 'sample')} "
            f"({counted(c.rl.rollout_batch_size, 'prompt')} x {counted(generations(c), 'answer')})"
        ),
        nearest_batches,
        batch_words,
        also=BATCH,
    ),
    Rule(
        "rl.rollout_batch_size",
        lambda c: rollout(c) and samples_per_update(c) <= samples_per_step(c) and not update_divides_step(c),
        lambda c: (
            f"the {counted(samples_per_step(c), 'sample')} of a step ({counted(c.rl.rollout_batch_size, 'prompt')} x "
            f"{counted(generations(c), 'answer')}) must split evenly into updates"
        ),
        nearest_batches,
        batch_words,
        also=BATCH,
    ),
    Rule(
        "rl.per_device_train_batch_size",
        lambda c: update_splits_groups(c) and update_divides_step(c),
        lambda c: f"an update must hold whole groups of {generations(c)} answers (verl counts it in prompts)",
        nearest_batches,
        batch_words,
        also=BATCH,
    ),
    Rule(
        "rl.warmup_ratio",
        warms_up_for_nothing,
        lambda c: (
            f"the learning rate of the first step is 0, so {counted(c.training.max_steps or 0, 'step')} would change "
            "little or nothing"
        ),
        lambda c: "write 0 for a short run",
        also=("training.max_steps",),
    ),
    Rule(
        "rl.kl_controller",
        lambda c: rollout(c) and c.rl.kl_controller == "adaptive" and kl_place(c) != "reward",
        lambda c: f"verl adapts kl_coef only where KL is charged in the reward, here it is `{kl_place(c)}`",
        lambda c: "set rl.kl_placement=reward, or rl.kl_controller=fixed",
        also=("rl.kl_placement",),
    ),
    Rule(
        "rl.top_k",
        lambda c: c.rl.top_k == 0,
        lambda c: "no token would be left to sample from",
        lambda c: "write -1 for all tokens",
    ),
    Rule(
        "rl.top_k",
        lambda c: rollout(c) and c.rl.top_k == 1,
        lambda c: "all answers to a prompt would be equal and nothing would be learned",
        lambda c: "write -1, or 20 or more",
    ),
    Rule(
        "rl.reward",
        lambda c: c.rl.reward not in ("preference", "verl", "model") and not is_function(c.rl.reward),
        lambda c: "must be preference, verl, model or function:FILE.py:NAME",
        lambda c: reward_fix(c.rl.reward),
    ),
    Rule(
        "model.reward_model_name_or_path",
        lambda c: rollout(c) and c.rl.reward == "model" and c.model.reward_model_name_or_path is None,
        lambda c: "rl.reward is `model`, so a reward model must be named",
        lambda c: "set model.reward_model_name_or_path, or rl.reward=preference",
        also=("rl.reward",),
    ),
    Rule(
        "model.torch_dtype",
        lambda c: c.training.device == "cpu" and c.model.torch_dtype == "float16",
        lambda c: (
            "float16 needs verl's loss scaler, which torch turns off without CUDA: small gradients would be lost, and "
            "the first infinite one would go into the weights"
        ),
        lambda c: "write float32, or bfloat16",
        also=("training.device",),
    ),
    Rule(
        "model.use_flash_attention_2",
        lambda c: c.training.device == "cpu" and c.model.use_flash_attention_2,
        lambda c: "flash-attn runs on CUDA only, and training.device is cpu",
        lambda c: "write false; torch's own attention (sdpa) is used",
        also=("training.device",),
    ),
    Rule(
        "rl.rollout_engine",
        lambda c: rollout(c) and c.training.device == "cpu" and c.rl.rollout_engine == "vllm",
        lambda c: "the vllm engine runs on CUDA only, and training.device is cpu",
        lambda c: "write hf",
        also=("training.device",),
    ),
    Rule(
        "rl.temperature",
        lambda c: rollout(c) and c.rl.rollout_engine == "vllm" and c.rl.temperature > VLLM_HOTTEST,
        lambda c: f"vllm samples at {VLLM_HOTTEST} at most",
        lambda c: f"write {VLLM_HOTTEST} or less, or set rl.rollout_engine=hf",
        also=("rl.rollout_engine",),
    ),
    Rule(
        "training.memory_budget_gb",
        lambda c: rollout(c) and c.rl.rollout_engine == "vllm" and c.training.memory_budget_gb is not None,
        lambda c: "vllm takes memory that the plan does not know, for its graphs and its longest pass",
        lambda c: "leave it out, or set rl.rollout_engine=hf",
        also=("rl.rollout_engine",),
    ),
    Rule(
        "training.backend",
        lambda c: c.training.backend == "local" and devices(c) > 1,
        lambda c: f"local is one process on one device, and training.num_devices is {devices(c)}",
        lambda c: "write ray, or set training.num_devices=1",
        also=("training.num_devices",),
    ),
    Rule(
        "training.eval_steps",
        lambda c: (c.training.eval_steps is not None or c.training.eval_before_train) and c.data.eval_file is None,
        lambda c: "there are no rows to evaluate on",
        lambda c: "set data.eval_file, or leave training.eval_steps and eval_before_train out",
        also=("training.eval_before_train", "data.eval_file"),
    ),
)


def is_function(reward: str) -> bool:
    """function:FILE.py:NAME"""
    head, _, rest = reward.partition(":")
    file, _, name = rest.rpartition(":")
    return head == "function" and file.endswith(".py") and name.isidentifier()


def reward_file(reward: str) -> str:
    """The FILE of function:FILE:NAME."""
    return reward.partition(":")[2].rpartition(":")[0]


def reward_fix(reward: str) -> str:
    """The nearest legal reward."""
    from quickstart.config.casting import nearest_fix

    if ".py" in reward or reward.startswith("function"):
        return "write function:FILE.py:NAME, for example function:my_reward.py:compute_score"
    return nearest_fix(reward, ("preference", "verl", "model", "function:FILE.py:NAME"))


def kl_place(cfg: RunConfig) -> str:
    """Where KL is charged, with "auto" understood: the reward for per-token methods, the loss for group methods."""
    if cfg.rl.kl_placement != "auto":
        return cfg.rl.kl_placement
    return "loss" if cfg.rl.rl_type in GROUP_TYPES else "reward"


def check_rules(cfg: RunConfig) -> list[tuple[Fault, frozenset[str]]]:
    """Every rule that cfg breaks, with the fields that it read."""
    return [
        (
            Fault(
                field=rule.field,
                found=rule.found(cfg) if rule.found else str(value_of(cfg, rule.field)),
                rule=rule.rule(cfg),
                fix=rule.fix(cfg),
            ),
            rule.reads,
        )
        for rule in RULES
        if rule.broken(cfg)
    ]


def value_of(cfg: RunConfig, key: str) -> object:
    """The value of `section.key`."""
    section, name = key.split(".")
    assert section in SECTIONS
    return vars(vars(cfg)[section])[name]


def fewer_rows(cfg: RunConfig, num_rows: int) -> str:
    """Settings whose step takes no more rows than there are, and which keep to all other rules."""
    if not rollout(cfg):
        least = 2 * devices(cfg) if cfg.rl.rl_type == "kto" else devices(cfg)
        size = num_rows // devices(cfg) * devices(cfg)
        return f"set {split(size, samples_per_update(cfg), devices(cfg))}, or add data" if size >= least else "add data"
    unit = math.lcm(samples_per_update(cfg), generations(cfg)) // generations(cfg)
    if unit <= num_rows:
        return f"write {num_rows // unit * unit}, or add data"
    smaller = dataclasses.replace(cfg, rl=dataclasses.replace(cfg.rl, rollout_batch_size=num_rows))
    size = max((size for size in legal_updates(smaller) if size <= samples_per_update(cfg)), default=0)
    update = f" {split(size, cfg.rl.per_device_train_batch_size, devices(cfg))}" if size else ""
    return f"set rl.rollout_batch_size={num_rows}{update}, or add data"


def check_steps(cfg: RunConfig, num_rows: int) -> int:
    """Steps of the whole run for so many training rows. Raises UserError where not even one batch fills.

    The data must be read to know this, so the trainer calls it, before anything heavy starts.
    """
    size = cfg.rl.rollout_batch_size if rollout(cfg) else samples_per_update(cfg)
    name = "rl.rollout_batch_size" if rollout(cfg) else "rl.per_device_train_batch_size"
    if num_rows < size:
        raise UserError(
            Fault(
                field=name,
                found=f"{size} for a step, with {counted(num_rows, 'row')} of data",
                rule="a step must not need more rows than there are",
                fix=fewer_rows(cfg, num_rows),
            )
        )
    return cfg.training.max_steps or (num_rows // size) * cfg.rl.num_train_epochs
