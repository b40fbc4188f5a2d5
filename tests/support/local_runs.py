"""PPO-family runs on the local backend without command line, console or output folder: settings in, metrics out.

What `quickstart.trainers.api` does between configuration and results, cut down to what a test looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REWARD_FILE = Path(__file__).with_name("digit_reward.py")

# One step: 8 prompts, a few dozen tokens each, in less than half a second.
SMALL: dict[str, dict[str, Any]] = {
    "model": {"torch_dtype": "float32"},
    "data": {"max_prompt_length": 64, "max_response_length": 16},
    "rl": {
        "rollout_batch_size": 8,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-3,
        "critic_learning_rate": 1e-3,
    },
    "training": {"seed": 1, "device": "cpu", "num_threads": 2, "save_steps": "never"},
}


def same(ours: Mapping[str, float], theirs: Mapping[str, float], limit: float = 1e-6) -> list[str]:
    """Names of metrics that differ by more (relative above 1). Times and memory do not count."""
    assert set(ours) == set(theirs)
    return [
        name
        for name in ours
        if not any(part in name for part in ("timing", "perf/", "/perf/"))
        and not abs(ours[name] - theirs[name]) <= limit * max(1.0, abs(theirs[name]))
    ]


def settings(policy: Path, **sections: Mapping[str, Any]) -> Any:
    """Resolved arguments: SMALL, then the policy's folder, then the sections given (model=..., rl=..., verl=...)."""
    from quickstart import config

    merged = {name: {**SMALL.get(name, {}), **sections.get(name, {})} for name in ("model", "data", "rl", "training")}
    merged["model"].setdefault("model_name_or_path", str(policy))
    given = (merged[name] for name in ("model", "data", "rl", "training"))
    return config.resolve(config.from_arguments(*given, sections.get("verl"))).cfg


def verl_config_of(
    cfg: Any,
    rows: Path,
    work: Path,
    *,
    steps: int,
    evaluation: Path | None = None,
    reward: tuple[Path, str] = (REWARD_FILE, "compute_score"),
) -> Any:
    """verl's whole configuration of a run: `rows` in verl's parquet format, checkpoints below `work`."""
    from quickstart import verl_compose, verl_config

    paths = verl_config.RunPaths(
        train=rows,
        evaluation=evaluation or rows,
        checkpoints=work / "checkpoints",
        reward_file=reward[0],
        reward_name=reward[1],
        reward_kwargs={},
    )
    return verl_compose.compose(verl_config.translate(cfg, paths, device="cpu", steps=steps), cfg.verl)


@dataclass
class Recording:
    """A Reporter that keeps everything."""

    phases: list[str] = field(default_factory=list)
    rollouts: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    updates: dict[int, dict[str, float]] = field(default_factory=dict)
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    checkpoints: dict[int, Path] = field(default_factory=dict)
    weights: dict[str, Any] = field(default_factory=dict)  # of the policy, after the run

    def phase(self, text: str) -> None:
        self.phases.append(text)

    def rollout(self, step: int, rows: list[dict[str, Any]]) -> None:
        self.rollouts[step] = rows

    def update(self, step: int, epoch: float, metrics: dict[str, float]) -> None:
        self.updates[step] = metrics

    def evaluation(self, step: int, epoch: float, metrics: dict[str, float], rows: list[dict[str, Any]]) -> None:
        self.evaluations[step] = metrics

    def saved(self, step: int, path: Path) -> None:
        self.checkpoints[step] = path


def run(
    config: Any,
    *,
    seed: int = 1,
    stop: Callable[[], bool] = lambda: False,
    before: Callable[[Any], None] | None = None,
    record: Recording | None = None,
) -> Recording:
    """Train on the local backend, seeded, with the CPU shims in place for as long as it takes.

    Args:
        before: called with the trainer, once its models are loaded.
        record: where to keep what is told, for runs that end with an error.
    """
    from quickstart.plugin import retry, shims
    from quickstart.trainers import environment, ppo

    environment.seed_everything(seed)
    record = record or Recording()
    micro = config.critic.ppo_micro_batch_size_per_gpu
    undo = shims.install("cpu", halving=retry.Halving(micro, record.phase))
    try:
        with environment.process_group(), ppo.local_trainer(config, record, stop) as trainer:
            if before is not None:
                before(trainer)
            ppo.fit(trainer)
            module = trainer._run.actor.worker.actor.engine.module
            record.weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
    finally:
        undo()
    return record
