"""The runs that are made twice, on stock verl with Ray and on the local backend, and must give the same numbers.

A case is a set of our arguments; both sides take verl's configuration from the same translation of it. Answers are not
generated but follow from (prompt, how often it was asked), so that neither engine nor random numbers matter, and rows
are put in a fixed order. What is left, and compared, is everything else: log-probs, values, advantages, losses,
updates, validation and metrics.
"""

from __future__ import annotations

import random
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import local_runs
import tiny_models

STEPS = 4
PROMPT_ROWS, EVALUATION_ROWS = 24, 4
SORTER = Path(__file__).with_name("sorted_buffer.py")
RESPONSE = 16

# Weights visibly move in 4 steps; rounding errors of another processor's instructions do not grow to the tolerance.
RATES = {"learning_rate": 3e-4, "critic_learning_rate": 3e-4}
# gradient norms, losses and entropies of the same size as in real runs; every switch that has code of its own
CASES: dict[str, dict[str, Any]] = {
    # GAE, critic, reference; adaptive KL in the reward; log-probs recomputed; validation
    "ppo": {
        "rl": {
            "rl_type": "ppo",
            "kl_placement": "reward",
            "kl_controller": "adaptive",
            "kl_coef": 0.05,
            "recompute_old_log_probs": True,
            "lam": 0.95,
            "gamma": 0.99,
        },
        "training": {"eval_before_train": True, "eval_steps": 2},
    },
    # as a first run on a CPU has it (log-probs of the rollout are the old ones), with 2 x 2 updates a step
    "ppo_minibatches": {
        "rl": {
            "rl_type": "ppo",
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "ppo_epochs": 2,
            "recompute_old_log_probs": False,
            "entropy_coef": 0.01,
        }
    },
    # groups of 4, KL as a loss, 2 updates a step with 2 micro batches each
    "grpo": {
        "rl": {
            "rl_type": "grpo",
            "num_generations": 4,
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "kl_placement": "loss",
            "kl_coef": 0.02,
            "recompute_old_log_probs": True,
        }
    },
}

# Not numbers of the algorithm: times, memory, throughput.
UNCOMPARED = ("timing", "perf/", "/perf/")
# Ours: verl's trainer does not have them.
LOCAL_ONLY = (
    "training/dead_group_share",
    "response_length/finished_share",
    "actor/ref_log_ratio_mean",
    "actor/ref_log_ratio_max",
)


@dataclass(frozen=True, kw_only=True)
class Files:
    """The models and rows of all cases, made anew wherever they are needed."""

    policy: Path
    critic: Path
    train: Path
    evaluation: Path

    @classmethod
    def make(cls, folder: Path) -> Files:
        rows = tiny_models.arithmetic_rows(PROMPT_ROWS + EVALUATION_ROWS)
        return cls(
            policy=tiny_models.save_policy(folder / "policy", "qwen2_tied"),
            critic=tiny_models.save_critic(folder / "critic"),
            train=tiny_models.save_rows(folder / "train.parquet", rows[:PROMPT_ROWS]),
            evaluation=tiny_models.save_rows(folder / "evaluation.parquet", rows[PROMPT_ROWS:]),
        )

    def sha256(self) -> dict[str, str]:
        """Of the weights; kept beside the reference."""
        return {name: tiny_models.weights_sha256(vars(self)[name]) for name in ("policy", "critic")}


def configuration(name: str, files: Files, work: Path, verl: dict[str, Any] | None = None) -> Any:
    """verl's configuration of a case, the same for both sides. `verl`: keys for a control that must fail."""
    case = CASES[name]
    cfg = local_runs.settings(
        files.policy,
        model={"critic_model_name_or_path": str(files.critic)},
        data={"max_response_length": RESPONSE, "eval_file": str(files.evaluation)},
        rl=RATES | case["rl"],
        training=case.get("training", {}),
        verl={
            "trainer.v1.sampler.custom_sampler.path": str(SORTER),
            "trainer.v1.sampler.custom_sampler.name": "SortedBuffer",
            **(verl or {}),
        },
    )
    return local_runs.verl_config_of(cfg, files.train, work, steps=STEPS, evaluation=files.evaluation)


class FixedAnswers:
    """Answers that depend on the prompt and on how often it has been asked; with made-up log-probs near uniform."""

    def __init__(self, stop_token: int) -> None:
        self._stop = stop_token
        self._asked: dict[int, int] = defaultdict(int)

    def __call__(self, prompt: Sequence[int], longest: int) -> tuple[list[int], list[float]]:
        """Token ids, most of them ending with the stop token, and one log-prob each."""
        key = zlib.crc32(str(list(prompt)).encode())
        self._asked[key] += 1
        draw = random.Random(key * 1009 + self._asked[key])
        length = draw.randint(3, longest)
        ids = [draw.randint(2, 257) for _ in range(length)]
        if length < longest:
            ids[-1] = self._stop
        return ids, [-5.5 - draw.random() / 10 for _ in ids]


def comparable(metrics: dict[str, Any]) -> dict[str, float]:
    """The metrics that must agree."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if name not in LOCAL_ONLY and not any(part in name for part in UNCOMPARED)
    }


def difference(ours: float, theirs: float) -> float:
    """Absolute below 1, relative above."""
    return abs(ours - theirs) / max(1.0, abs(theirs))
