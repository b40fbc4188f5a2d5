"""Preference runs on the settings of scripts/make_trl_reference.py, and a reporter that remembers. Also run as a rank.

python tests/support/preference_runs.py MODEL CASE RANK WORLD STORE OUT      (test_preference_ranks.py starts it)
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BUNDLED = ROOT / "data" / "bundled_model"
ROWS = ROOT / "data" / "sample_100.jsonl"


def load_script(name: str) -> Any:
    """A file of scripts/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


trl = load_script("make_trl_reference")


@dataclass(kw_only=True)
class Memory:
    """A reporter that keeps everything."""

    phases: list[str] = field(default_factory=list)
    rollouts: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    updates: list[dict[str, float]] = field(default_factory=list)
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    checkpoints: list[Path] = field(default_factory=list)

    def phase(self, text: str) -> None:
        self.phases.append(text)

    def rollout(self, step: int, rows: list[dict[str, Any]]) -> None:
        self.rollouts[step] = rows

    def update(self, step: int, epoch: float, metrics: dict[str, float]) -> None:
        assert step == metrics["training/global_step"]
        self.updates.append(metrics | {"epoch": epoch})

    def evaluation(self, step: int, epoch: float, metrics: dict[str, float], rows: list[dict[str, Any]]) -> None:
        self.evaluations[step] = metrics

    def saved(self, step: int, path: Path) -> None:
        self.checkpoints.append(path)


def rows_of(kind: str, count: int = 100) -> list[Any]:
    """The sample rows as the data room gives them, in the order of the file; kto: one answer of each pair."""
    from quickstart.data.prepare import Labelled, Pair

    found: list[Any] = []
    for i, line in enumerate(ROWS.read_text(encoding="utf-8").splitlines()[:count]):
        row = json.loads(line)
        place: dict[str, Any] = {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "file": ROWS.name,
            "line": i + 1,
        }
        if kind == "kto":
            good = trl.is_good(i)
            found.append(Labelled(completion=row["chosen" if good else "rejected"], label=good, **place))
        else:
            found.append(Pair(chosen=row["chosen"], rejected=row["rejected"], **place))
    return found


def settings(model: Path, kind: str, folder: Path, **changes: Any) -> Any:
    """Resolved settings like TRL's of the stored cases. changes: `section.key`, or `verl` with a mapping."""
    from quickstart import config

    sections: dict[str, dict[str, Any]] = {
        "model": {"model_name_or_path": str(model), "torch_dtype": "float32"},
        "data": {"train_file": str(ROWS), "max_prompt_length": 256, "max_response_length": 256, "shuffle": False},
        "rl": {
            "rl_type": kind,
            "per_device_train_batch_size": trl.MICRO,
            "gradient_accumulation_steps": trl.ACCUMULATE,
            "learning_rate": trl.LEARNING_RATE,
            "weight_decay": 0.0,
            "beta": trl.BETA,
        },
        "training": {"output_dir": str(folder), "device": "cpu", "num_threads": 2, "save_steps": "never"},
    }
    if kind == "kto":
        sections["rl"] |= trl.KTO_WEIGHTS
    verl = changes.pop("verl", {})
    for key, value in changes.items():
        section, _, name = key.partition(".")
        sections[section][name] = value
    parts = (sections["model"], sections["data"], sections["rl"], sections["training"])
    return config.resolve(config.from_arguments(*parts, verl)).cfg


@contextlib.contextmanager
def ready(device: str = "cpu", *, one_device: bool = True) -> Iterator[None]:
    """Shims in place and a process group there."""
    from quickstart.plugin import shims
    from quickstart.trainers import environment

    undo = shims.install(device, one_device=one_device)
    try:
        with environment.process_group():
            yield
    finally:
        undo()


def constant_reward(**_: Any) -> float:
    return 0.5


def build(cfg: Any, rows: list[Any], evaluation: list[Any] = (), *, steps: int, memory: Memory, **more: Any) -> Any:  # type: ignore[assignment]
    """A PreferenceTrainer in a prepared process; more: its keywords, and lora_fill."""
    from transformers import AutoTokenizer

    from quickstart import verl_compose, verl_config
    from quickstart.plugin.training import Policy
    from quickstart.trainers.preference import PreferenceTrainer
    from quickstart.trainers.preference_data import encode

    tokenizer = AutoTokenizer.from_pretrained(cfg.model.model_name_or_path)
    data = encode(cfg, tokenizer, rows, evaluation, 1024)
    keys = verl_config.translate_preference(cfg, chat_template=None, steps=steps)
    policy = Policy(verl_compose.compose_preference(keys, cfg.verl), data.objective, data.objective.group)
    if more.pop("fill", False):
        trl.fill_adapters([(n, w) for n, w in policy.module.named_parameters() if "lora_" in n])
    folder = Path(cfg.training.output_dir)
    options: dict[str, Any] = {
        "folder": folder / "checkpoints",
        "cache": folder / "cache",
        "reward": constant_reward,
        "stop": lambda: False,
        **more,
    }
    return PreferenceTrainer(policy, cfg, data, tokenizer, steps=steps, reporter=memory, **options)


def weights_of(trainer: Any) -> dict[str, Any]:
    """Every parameter, whole, by the names of the stored cases."""
    return {
        trl.plain_name(name): (weight.full_tensor() if "DTensor" in type(weight).__name__ else weight).detach().clone()
        for name, weight in trainer.policy.module.named_parameters()
    }


def train(cfg: Any, kind: str, *, steps: int, **more: Any) -> tuple[Memory, dict[str, Any], dict[str, Any]]:
    """Train without samples. Gives what was reported, and the weights before and after."""
    memory = Memory()
    trainer = build(cfg, rows_of(kind), steps=steps, memory=memory, **more)
    before = weights_of(trainer)
    trainer._sampler = None
    trainer.fit()
    return memory, before, weights_of(trainer)


RANK_STEPS = {"dpo": 10, "kto": 4}


def rank_main(model: str, rank: str, world: str, store: str, out: str) -> None:
    """One process of a run on several; rank 0 writes what was reported and the weights' fingerprints."""
    import os

    from quickstart.trainers import environment

    environment.set_variables("cpu")
    os.environ.update(RANK=rank, WORLD_SIZE=world)
    environment.set_threads(1)
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world))
    found = {}
    changes = {"rl.gradient_accumulation_steps": trl.ACCUMULATE // int(world)}
    for case, steps in RANK_STEPS.items():
        cfg = settings(Path(model), case, Path(out).parent / f"rank{rank}", **changes)
        with ready(one_device=False):
            memory, before, after = train(cfg, case, steps=steps)
        found[case] = {"steps": memory.updates, "weights": trl.fingerprint(before, after)}
    if rank == "0":
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    rank_main(*sys.argv[1:])
