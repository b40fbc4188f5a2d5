"""Where an interrupted run goes on: the checkpoint that is meant, and the records that lead up to it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quickstart.arguments import RunConfig
from quickstart.errors import Fault, UserError
from quickstart.outputs import CHECKPOINTS, MODEL_FOLDER, TRAINER_STATE

STEP_FOLDER = re.compile(r"global_step_(\d+)")


@dataclass(frozen=True, kw_only=True)
class Point:
    """A checkpoint to go on from."""

    folder: Path
    step: int
    history: list[dict[str, Any]]  # log_history up to that step


def find(cfg: RunConfig) -> Point | None:
    """The checkpoint that training.resume_from_checkpoint names; None for a new run.

    Raises:
        UserError: no such checkpoint, one of another output folder, or one without the files that training needs.
    """
    wanted = cfg.training.resume_from_checkpoint
    if wanted is None:
        return None
    root = Path(cfg.training.output_dir).expanduser().absolute()
    there = [path for path in checkpoints(root) if is_complete(path)]
    folder = there[-1] if wanted == "latest" and there else Path(wanted).expanduser().absolute()
    match = STEP_FOLDER.fullmatch(folder.name)
    if match is None or not is_complete(folder):
        names = ", ".join(path.name for path in there) or "none"
        rule = "must be a folder global_step_N that a run has written whole, or latest"
        raise _fault(wanted, rule, f"there are: {names}")
    if folder.parent != root / CHECKPOINTS:
        rule = "a run goes on in its own output folder"
        raise _fault(wanted, rule, f"set training.output_dir={folder.parent.parent}")
    step = int(match.group(1))
    return Point(folder=folder, step=step, history=history(root, step))


def checkpoints(root: Path) -> list[Path]:
    """The checkpoint folders of an output folder, oldest first."""
    found = [path for path in (root / CHECKPOINTS).glob("global_step_*") if STEP_FOLDER.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.rsplit("_", 1)[1]))


def is_complete(folder: Path) -> bool:
    """Whether the save went to its end: the exported model is written last, and renamed into place."""
    return (folder / "actor").is_dir() and (folder / MODEL_FOLDER).is_dir()


def history(root: Path, step: int) -> list[dict[str, Any]]:
    """The records of trainer_state.json up to a step; empty where there is no such file."""
    path = root / TRAINER_STATE
    if not path.is_file():
        return []
    state = json.loads(path.read_text(encoding="utf-8"))
    return [record for record in state["log_history"] if record["step"] <= step]


def _fault(wanted: str, rule: str, fix: str) -> UserError:
    return UserError(Fault(field="training.resume_from_checkpoint", found=wanted, rule=rule, fix=fix))
