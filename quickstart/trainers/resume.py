"""Where an interrupted run goes on: the checkpoint that is meant, and the records that lead up to it."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quickstart.arguments import RunConfig
from quickstart.errors import Fault, RunError, UserError
from quickstart.outputs import CHECKPOINTS, TRAINER_STATE
from quickstart.writing import to_json, write_atomic

STEP_FOLDER = re.compile(r"global_step_(\d+)")
MANIFEST = "complete.json"  # written last: method, and size of every file


@dataclass(frozen=True, kw_only=True)
class Point:
    """A checkpoint to go on from."""

    folder: Path
    step: int
    history: list[dict[str, Any]]  # log_history up to that step


def find(cfg: RunConfig, steps: int) -> Point | None:
    """The checkpoint that training.resume_from_checkpoint names; None for a new run.

    Args:
        steps: of the whole run.

    Raises:
        UserError: no such checkpoint, one of another output folder or method, one whose files are not what was written,
            or one with nothing left to do.
    """
    wanted = cfg.training.resume_from_checkpoint
    if wanted is None:
        return None
    root = Path(cfg.training.output_dir).expanduser().absolute()
    there = [path for path in checkpoints(root) if is_complete(path)]
    folder = there[-1] if wanted == "latest" and there else Path(wanted).expanduser().absolute()
    match = STEP_FOLDER.fullmatch(folder.name)
    if match is None or not is_complete(folder):
        names = ", ".join(path.name for path in there)
        rule = "must be a folder global_step_N that a run has written whole, or latest"
        fix = f"write latest, or one of these in {root / CHECKPOINTS}: {names}"
        raise _fault(wanted, rule, fix if names else f"leave it out: no run in {root} has left one")
    if folder.parent != root / CHECKPOINTS:
        rule = "a run goes on in its own output folder"
        raise _fault(wanted, rule, f"set training.output_dir={folder.parent.parent}")
    step = int(match.group(1))
    _check(cfg, wanted, folder, step, steps)
    return Point(folder=folder, step=step, history=history(root, step))


def checkpoints(root: Path) -> list[Path]:
    """The checkpoint folders of an output folder, oldest first."""
    found = [path for path in (root / CHECKPOINTS).glob("global_step_*") if STEP_FOLDER.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.rsplit("_", 1)[1]))


def _check(cfg: RunConfig, wanted: str, folder: Path, step: int, steps: int) -> None:
    written = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    if written["rl_type"] != cfg.rl.rl_type:
        rule = f"{folder.name} was written by {written['rl_type']}, and this run is {cfg.rl.rl_type}"
        fix = f"set rl.rl_type={written['rl_type']}, or start from its weights: model.model_name_or_path={folder}/model"
        raise _fault(wanted, rule, fix)
    changed = damage(folder, written["files"])
    if changed:
        raise _fault(wanted, f"{folder.name} is damaged: {'; '.join(changed)}", "go on from an earlier checkpoint")
    if step >= steps:
        rule = f"the run is at step {step} of {steps}: nothing is left to do"
        raise _fault(wanted, rule, "raise training.max_steps or rl.num_train_epochs")


def write_manifest(folder: Path, rl_type: str) -> None:
    """Say that a checkpoint is whole; after all of its files."""
    files = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    write_atomic(folder / MANIFEST, to_json({"rl_type": rl_type, "files": files}, indent=2))


def damage(folder: Path, files: dict[str, int]) -> list[str]:
    """What is not as it was written, of the first three."""
    found = []
    for name, size in files.items():
        path = folder / name
        if not path.is_file():
            found.append(f"{name} is missing")
        elif path.stat().st_size != size:
            found.append(f"{name} has {path.stat().st_size:,} bytes of {size:,}")
    return found[:3]


def is_complete(folder: Path) -> bool:
    """Whether the save went to its end."""
    return (folder / MANIFEST).is_file()


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Whatever goes wrong inside is the checkpoint's doing: its files have the right sizes and cannot be read."""
    try:
        yield
    except (MemoryError, UserError):
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        rule = f"the checkpoint cannot be read: {type(error).__name__}: {first}"
        fix = "go on from an earlier checkpoint, with the versions and settings that wrote it"
        fault = Fault(field="training.resume_from_checkpoint", found=str(folder), rule=rule, fix=fix)
        raise RunError(fault) from error


def history(root: Path, step: int) -> list[dict[str, Any]]:
    """The records of trainer_state.json up to a step; empty where there is no such file."""
    path = root / TRAINER_STATE
    if not path.is_file():
        return []
    state = json.loads(path.read_text(encoding="utf-8"))
    return [record for record in state["log_history"] if record["step"] <= step]


def _fault(wanted: str, rule: str, fix: str) -> UserError:
    return UserError(Fault(field="training.resume_from_checkpoint", found=wanted, rule=rule, fix=fix))
