"""One run, read from its folder: what it was, its curves, and its last answers. Knows no trainer.

A run that died has less: what is there is used, what is missing is a blank. Only a folder without any record, or a
file that is not what its name says, is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from quickstart.arguments import PREFERENCE_TYPES
from quickstart.errors import Fault, UserError
from quickstart.outputs import CONFIG, ROLLOUTS, RUN, TRAINER_STATE

Points = list[tuple[int, float]]  # (step, value), in the order of steps
TOLD = ("prompt", "response", "reward")  # what a line of a rollout must have


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One quantity over steps. names: under which it is recorded, the first that a run has counts."""

    key: str
    title: str
    names: tuple[str, ...]
    note: str = ""


CURVES = (
    Curve(
        key="reward",
        title="Reward of the answers",
        names=("reward", "critic/score/mean", "critic/rewards/mean"),
        note="Lines: mean of each rollout, sampled while training. Rings: methods without rollouts; mean of a few "
        "greedy answers before training (step 0) and after it (last step).",
    ),
    Curve(
        key="loss",
        title="Loss",
        names=("loss", "actor_loss", "actor/pg_loss"),
        note="Its height means something else in each method; compare the way it goes.",
    ),
    Curve(
        key="kl",
        title="KL",
        names=("kl", "actor/reward_kl_penalty", "actor/kl_loss", "actor/ppo_kl"),
        note="Methods with rollouts: per token, an estimate that can be a little below 0. kto: of whole answers, the "
        "mean of a batch cut off at 0, so a curve at 0 may also be one below it.",
    ),
    Curve(
        key="margin",
        title="Margin",
        names=("rewards/margins",),
        note="Implicit reward of chosen answers less that of rejected ones.",
    ),
    Curve(
        key="accuracy",
        title="Accuracy",
        names=("rewards/accuracies",),
        note="Share of pairs in which the chosen answer has the higher implicit reward.",
    ),
    Curve(key="seconds", title="Seconds a step", names=("timing_s/step",)),
)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A prompt's answer in a rollout."""

    response: str
    reward: float | None


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the files of one run say."""

    name: str
    folder: Path
    facts: dict[str, Any]  # run.json
    settings: dict[str, Any]  # config.yaml
    curves: dict[str, Points]
    steps: int
    answers: dict[str, Answer] = field(default_factory=dict)  # prompt -> its answer in the last rollout
    sampled: int = 0  # rewards are means of so many greedy answers, before and after training; 0: of rollouts

    @property
    def algorithm(self) -> str:
        """rl_type, where it is recorded."""
        return str(self.facts.get("rl_type") or section(self.settings, "rl").get("rl_type") or "?")

    @property
    def model(self) -> str:
        """Name of the policy."""
        return Path(str(section(self.settings, "model").get("model_name_or_path") or "?")).name


def section(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """A section of config.yaml; empty where there is none."""
    found = settings.get(name)
    return found if isinstance(found, dict) else {}


def read_runs(folders: Iterable[Path]) -> list[Run]:
    """All runs, under different names. Raises UserError with the faults of all of them."""
    folders = list(folders)
    names = names_of(folders)
    runs: list[Run] = []
    faults: list[Fault] = []
    for folder, name in zip(folders, names, strict=True):
        try:
            runs.append(read_run(folder, name))
        except UserError as error:  # gathered: one message for all folders
            faults.extend(error.faults)
    if faults:
        raise UserError(faults)
    return runs


def names_of(folders: list[Path]) -> list[str]:
    """The shortest ends of the paths that differ from each other; the same folder twice gets a number."""
    parts = [folder.absolute().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-length:]) for p in parts]
        if len(set(names)) == len(set(parts)):
            break
    return [name if names.index(name) == i else f"{name} ({i + 1})" for i, name in enumerate(names)]


def read_run(folder: Path, name: str) -> Run:
    """One run.

    Raises:
        UserError: no folder, no record in it, or a file that cannot be read.
    """
    if not folder.is_dir():
        fix = "name the output folders of runs, or a folder under outputs/history"
        raise UserError(Fault(field=str(folder), found="no such folder", rule="a run is a folder", fix=fix))
    rollouts = sorted((folder / ROLLOUTS).glob("rollout_*.jsonl"))
    state = read_json(folder / TRAINER_STATE)
    if not state and not rollouts:
        fix = f"name a folder with {TRAINER_STATE}, the training.output_dir of a run"
        rule = f"a run has {TRAINER_STATE} or {ROLLOUTS}/; this one ended before its first step, or is none"
        raise UserError(Fault(field=str(folder), found="no records", rule=rule, fix=fix))
    history = history_of(state, folder / TRAINER_STATE)
    curves = {curve.key: points for curve in CURVES if (points := points_of(history, curve.names))}
    contents = [(int(path.stem.rpartition("_")[2]), read_rollout(path)) for path in rollouts]
    run = Run(
        name=name,
        folder=folder,
        facts=read_json(folder / RUN),
        settings=read_yaml(folder / CONFIG),
        curves=curves,
        steps=max((entry["step"] for entry in history), default=0),
        answers=answers_of(contents[-1][1]) if contents else {},
    )
    if "reward" in curves or not contents:
        return run
    is_sampled = run.algorithm in PREFERENCE_TYPES
    curves["reward"] = rewards_of(contents, first_step=0 if is_sampled else 1)
    return replace(run, sampled=len(contents[-1][1]) if is_sampled else 0)


def rewards_of(contents: list[tuple[int, list[dict[str, Any]]]], *, first_step: int) -> Points:
    """Mean reward of each rollout file; first_step: where that of file 0 stands."""
    means = [(number + first_step, mean([row["reward"] for row in rows])) for number, rows in contents]
    return [(step, value) for step, value in means if value is not None]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no file. Raises UserError."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # also UnicodeDecodeError
        raise broken(path, str(error)) from None
    if not isinstance(content, dict):
        raise broken(path, f"a {type(content).__name__} where an object belongs")
    return content


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML mapping; empty where there is no file. Raises UserError."""
    if not path.is_file():
        return {}
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:
        raise broken(path, " ".join(str(error).split())) from None
    if not isinstance(content, dict):
        raise broken(path, "no mapping of settings")
    return content


def broken(path: Path, what: str) -> UserError:
    """A file that is not what its name says."""
    fix = "copy the file again from where the run was, or leave this run out"
    return UserError(Fault(field=str(path), found=what[:200], rule="must be readable as a run wrote it", fix=fix))


def history_of(state: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    """Entries of log_history that have a step. Raises UserError where there is no such list."""
    history = state.get("log_history", [])
    if not isinstance(history, list):
        raise broken(path, "log_history is no list")
    return [entry for entry in history if isinstance(entry, dict) and isinstance(entry.get("step"), int)]


def points_of(history: list[dict[str, Any]], names: tuple[str, ...]) -> Points:
    """The finite values of the first name that any entry has; evaluations have names of their own."""
    name = next((name for name in names if any(name in entry for entry in history)), None)
    if name is None:
        return []
    return [(entry["step"], float(entry[name])) for entry in history if is_finite(entry.get(name))]


def is_finite(value: Any) -> bool:
    """Whether it can be drawn."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def mean(values: list[Any]) -> float | None:
    """Of what is finite; None where nothing is."""
    finite = [float(value) for value in values if is_finite(value)]
    return sum(finite) / len(finite) if finite else None


def read_rollout(path: Path) -> list[dict[str, Any]]:
    """The lines of a rollout file. Raises UserError with the line."""
    rows = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                rows.append(read_line(line, path, number))
    return rows


def read_line(line: str, path: Path, number: int) -> dict[str, Any]:
    """One line. Raises UserError."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise broken(path.with_name(f"{path.name}:{number}"), str(error)) from None
    if not isinstance(row, dict) or not all(name in row for name in TOLD):
        raise broken(path.with_name(f"{path.name}:{number}"), f"a line without {', '.join(TOLD)}")
    return row


def answers_of(rows: list[dict[str, Any]]) -> dict[str, Answer]:
    """The first answer to each prompt."""
    found: dict[str, Answer] = {}
    for row in rows:
        prompt = row["prompt"] if isinstance(row["prompt"], str) else last_message(row["prompt"])
        reward = float(row["reward"]) if is_finite(row["reward"]) else None
        found.setdefault(prompt, Answer(response=str(row["response"]), reward=reward))
    return found


def last_message(messages: Any) -> str:
    """The text of a conversation's last message."""
    last = messages[-1] if isinstance(messages, list) and messages else messages
    return str(last.get("content", last)) if isinstance(last, dict) else str(last)
