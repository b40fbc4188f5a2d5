"""What a run left in its output folder, read back for tests with plain JSON and safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def run_json(outputs: Path) -> dict[str, Any]:
    return json.loads((outputs / "run.json").read_text(encoding="utf-8"))


def history(outputs: Path) -> list[dict[str, Any]]:
    """log_history of trainer_state.json."""
    return json.loads((outputs / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]


def rollouts(outputs: Path) -> list[list[dict[str, Any]]]:
    """Rows of each step's file, in the order of the steps."""
    files = sorted((outputs / "rollouts").glob("rollout_*.jsonl"))
    return [[json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] for file in files]


def rewards(outputs: Path) -> list[list[float]]:
    """Rewards of each step, sorted by prompt and answer: the order within a step is no promise."""
    return [
        [row["reward"] for row in sorted(rows, key=lambda r: (str(r["prompt"]), r["response"]))]
        for rows in rollouts(outputs)
    ]


def losses(outputs: Path, names: tuple[str, ...] = ("reward", "kl", "actor_loss", "critic_loss")) -> list[float]:
    """The plain numbers of all steps, one list."""
    return [entry[name] for entry in history(outputs) for name in names if name in entry]


def model_folder(outputs: Path) -> Path:
    """The exported model of the last checkpoint."""
    steps = (outputs / "checkpoints").glob("global_step_*")
    return max(steps, key=lambda path: int(path.name.rsplit("_", 1)[1])) / "model"


def weights(folder: Path) -> dict[str, Any]:
    """All weights of a model folder in float64."""
    from safetensors.torch import load_file

    return {name: value.double() for name, value in load_file(folder / "model.safetensors").items()}


def largest_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Over all weights; both must have the same names."""
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)
