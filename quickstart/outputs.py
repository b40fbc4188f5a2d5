"""The output folder of a run: what its files are called, who may write there, and where the run before it goes.

    with OutputFolder.claim("outputs") as outputs:
        outputs.log ... outputs.rollout_file(step)

Claiming moves a run that is there to history/<id>/, so nothing is ever overwritten. Files that are not a run's are
left alone; where one of them stands in the way, the claim is refused. Not here: what the files hold.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from quickstart.errors import Fault, UserError
from quickstart.writing import to_json, write_json

CONFIG = "config.yaml"
RUN = "run.json"
DOCTOR = "doctor.json"
ROLLOUTS = "rollouts"
TRAINER_STATE = "trainer_state.json"
TENSORBOARD = "runs"
CHECKPOINTS = "checkpoints"
MODEL_FOLDER = "model"  # in a checkpoint, beside verl's own folders: what from_pretrained loads
LOGS = "logs"
LOG = "run.log"
VERIFY = "verify.json"
REPORT = "report.html"
# Moved with a run, in this order; run.json last, since it is what marks the folder as a run.
ARTEFACTS = (CONFIG, DOCTOR, ROLLOUTS, TRAINER_STATE, TENSORBOARD, CHECKPOINTS, LOGS, VERIFY, REPORT, RUN)

HISTORY = "history"  # earlier runs, never touched again
CACHE = "cache"  # converted data, useful to the next run too
LOCK = ".lock"
MARK = "quickstart"  # the key that makes a run.json ours
MIN_FREE_BYTES = 100 * 2**20
HELD: set[Path] = set()  # folders that this process has now
CLAIMED: list[Path] = []  # folders that it ever had, the last one at the end


@dataclass(frozen=True)
class OutputFolder:
    """A claimed folder. Paths only; the folders among them exist."""

    root: Path
    moved_to: Path | None = None  # where the run before this one went

    @classmethod
    def claim(cls, output_dir: str | Path, *, keep: bool = False) -> OutputFolder:
        """Take the folder for this process. keep: go on with the run in it (resume) and move nothing.

        Raises UserError. Call it after all other checks: a config error must leave the folder as it was.
        """
        root = check(output_dir)
        root.mkdir(parents=True, exist_ok=True)
        take_lock(root)
        try:
            moved_to = None if keep else archive(root)
            write_json(root / RUN, {**read_run(root), MARK: True, "exit_reason": "running"})  # first: it is the mark
            for name in (ROLLOUTS, TENSORBOARD, CHECKPOINTS, LOGS):
                (root / name).mkdir(exist_ok=True)
        except BaseException:
            cls(root).release()
            raise
        return cls(root, moved_to)

    def release(self) -> None:
        """Let others have the folder. May be called twice."""
        if self.root in HELD:
            HELD.discard(self.root)
            (self.root / LOCK).unlink(missing_ok=True)

    def __enter__(self) -> OutputFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    @property
    def config(self) -> Path:
        return self.root / CONFIG

    @property
    def run(self) -> Path:
        return self.root / RUN

    @property
    def doctor(self) -> Path:
        return self.root / DOCTOR

    @property
    def rollouts(self) -> Path:
        return self.root / ROLLOUTS

    @property
    def trainer_state(self) -> Path:
        return self.root / TRAINER_STATE

    @property
    def tensorboard(self) -> Path:
        return self.root / TENSORBOARD

    @property
    def checkpoints(self) -> Path:
        return self.root / CHECKPOINTS

    @property
    def log(self) -> Path:
        return self.root / LOGS / LOG

    @property
    def cache(self) -> Path:
        return self.root / CACHE

    @property
    def verify(self) -> Path:
        return self.root / VERIFY

    @property
    def report(self) -> Path:
        return self.root / REPORT

    def rollout_file(self, step: int) -> Path:
        """Rollouts of one step. Steps count from 1, files from 0, as in verl's own dumps of a first step."""
        return self.rollouts / f"rollout_{step - 1:06d}.jsonl"

    def evaluation_file(self, step: int) -> Path:
        """Answers of the evaluation after `step` steps (0: before training)."""
        return self.rollouts / f"evaluation_{step:06d}.jsonl"

    def checkpoint(self, step: int) -> Path:
        """verl's own name for the checkpoint of a step."""
        return self.checkpoints / f"global_step_{step}"

    def update_run(self, **facts: Any) -> None:
        """Add facts to run.json."""
        write_json(self.run, {**read_run(self.root), **facts}, durable="exit_reason" in facts)


def check(output_dir: str | Path) -> Path:
    """The absolute folder, if a run may write there. Changes nothing. Raises UserError."""
    root = Path(output_dir).expanduser().absolute()
    there = next(folder for folder in (root, *root.parents) if folder.exists() or folder.is_symlink())
    if not there.is_dir():
        raise refusal(output_dir, f"{there} is a file", "results need a folder", "name another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise refusal(
            output_dir, f"{there} may not be written", "results need a writable folder", "name another folder"
        )
    if root == Path(root.anchor):
        raise refusal(
            output_dir, "the root of all folders", "results need a folder of their own", "name another folder"
        )
    disk = shutil.disk_usage(there)
    if disk.total == 0:
        raise refusal(output_dir, f"{there}, which is on no disk", "results must be kept", "name another folder")
    if disk.free < MIN_FREE_BYTES:
        found, fix = f"{disk.free / 2**20:.0f} MB free on its disk", "free some space, or name a folder on another disk"
        raise refusal(output_dir, found, f"at least {MIN_FREE_BYTES >> 20} MB must be free", fix)
    check_lock(root)
    check_foreign(root)
    return root


def refusal(output_dir: str | Path, found: str, rule: str, fix: str) -> UserError:
    """All refusals are about one field."""
    return UserError(Fault(field=f"training.output_dir={output_dir}", found=found, rule=rule, fix=fix))


def check_foreign(root: Path) -> None:
    """A file of ours by name, but not by a run of ours, must not be overwritten."""
    present = [name for name in ARTEFACTS if (root / name).exists() or (root / name).is_symlink()]
    if present and not is_run(root):
        found = f"{', '.join(present)}, not written by a run"
        raise refusal(root, found, "nothing is overwritten", "name an empty or new folder")


def is_run(root: Path) -> bool:
    """Whether the folder holds a run of ours."""
    return MARK in read_run(root)


def read_run(root: Path) -> dict[str, Any]:
    """run.json, or nothing where there is none that we can read."""
    return read_object(root / RUN)


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is none (no file, a foreign one, half of one)."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def archive(root: Path) -> Path | None:
    """Move the run in the folder to history/<id>/. None where there is none."""
    present = [name for name in ARTEFACTS if (root / name).exists() or (root / name).is_symlink()]
    if not present:
        return None
    folder = free_name(root / HISTORY / run_id(root))
    folder.mkdir(parents=True)
    for name in present:
        os.rename(root / name, folder / name)
    return folder


def run_id(root: Path) -> str:
    """When the run started, and what it was: 2026-01-31_14-05-09_ppo."""
    facts = read_run(root)
    started = str(
        facts.get("started") or time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime((root / RUN).stat().st_mtime))
    )
    stamp = started[:19].replace("T", "_").replace(":", "-").replace("/", "-")
    return "_".join([stamp, *([str(facts["rl_type"])] if "rl_type" in facts else [])])


def free_name(wanted: Path) -> Path:
    """The path itself, or with -2, -3 ... where it is taken."""
    candidate, number = wanted, 1
    while candidate.exists():
        number += 1
        candidate = wanted.with_name(f"{wanted.name}-{number}")
    return candidate


def take_lock(root: Path) -> None:
    """Write our process into the lock file. Raises UserError when another run has the folder.

    The file is flock-ed while it is read and written, so that of two runs that find a dead one's lock only one gets
    it. flock alone would not do: a forked child that outlives its run would keep it.
    """
    path = root / LOCK
    while True:
        with open(path, "a+b") as file:
            with contextlib.suppress(OSError):  # a network disk without flock: the race is then not closed
                fcntl.flock(file, fcntl.LOCK_EX)
            if not path.exists() or os.fstat(file.fileno()).st_ino != path.stat().st_ino:
                continue  # its owner removed it between our open and our flock
            check_lock(root)
            file.truncate(0)
            file.write(to_json({"pid": os.getpid(), "host": socket.gethostname(), "born": birth(os.getpid())}).encode())
        HELD.add(root)
        CLAIMED.append(root)
        return


def check_lock(root: Path) -> None:
    """Raises UserError when a living run has the folder."""
    path = root / LOCK
    rule, wait = "one run at a time in a folder", "wait for it, or name another folder"
    if root in HELD:
        raise refusal(root, "a run of this process", rule, wait)
    owner = read_object(path)
    if not {"pid", "host", "born"} <= owner.keys():
        return  # no lock, or its writer died before it was filled
    if owner["host"] != socket.gethostname():
        fix = f"name another folder; if that run is over, delete {path}"
        raise refusal(root, f"a run on {owner['host']}", rule, fix)
    if owner["pid"] != os.getpid() and is_alive(owner["pid"], owner["born"]):
        raise refusal(root, f"a run that is going on (process {owner['pid']})", rule, wait)


def is_alive(pid: int, born: str | None) -> bool:
    """Whether the very process that wrote the lock still runs, and not a later one with its number."""
    if born is not None:
        return birth(pid) == born
    try:  # no /proc here (macOS): the number has to do
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def birth(pid: int) -> str | None:
    """When a process started, in the kernel's clock ticks. None: gone, or no /proc on this system."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
