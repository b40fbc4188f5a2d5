"""Find the local files and folders that a config names: from the current folder, then from the repository.

Names on the hub and glob patterns are left as they are. Whether a file is good is for the data room and the doctor.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL_FOLDER = "a folder with config.json, or owner/name on the hub"
DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".gz", ".txt", ".zst", ".bz2", ".xz")


@dataclass(frozen=True)
class Found:
    """Where a path was found; notice is empty when that needs no word."""

    path: str
    notice: str = ""


@dataclass(frozen=True)
class Missing:
    """A local path that does not exist or is of the wrong kind, with what may have been meant."""

    path: str
    rule: str
    fix: str

    @property
    def is_near(self) -> bool:
        """Whether `fix` names one that exists."""
        return self.fix.startswith("did you mean")


def repository_of(config_path: str | None) -> Path:
    """The folder above configs/ for a config inside one, else the folder of this package's checkout."""
    if config_path is not None:
        folder = Path(config_path).resolve().parent
        return folder.parent if folder.name == "configs" else folder
    return REPOSITORY


def locate(written: str, kind: Literal["model", "data"], repository: Path) -> Found | Missing:
    """Look a path up. A trailing slash is dropped, ~ is expanded."""
    text = os.path.expanduser(written.strip())
    text = text.rstrip("/\\") or text
    if kind == "model" and os.path.isfile(text):
        return Missing(text, "a model is a folder, and this is a file", model_file_fix(Path(text)))
    if any(mark in text for mark in "*?[") or os.path.exists(text):
        return Found(text)
    for base in dict.fromkeys((repository, REPOSITORY)):
        if not os.path.isabs(text) and (base / text).exists():
            return Found(str(base / text), f"not in the current folder; using {base / text}")
    if looks_local(text, kind, repository):
        return Missing(text, missing_rule(text, kind, repository), missing_fix(text, kind, repository))
    return Found(text)


def model_file_fix(file: Path) -> str:
    """The folder of a weight file, where that is a model."""
    if (file.parent / "config.json").is_file():
        return f"write {file.parent}"
    return f"write the path of {MODEL_FOLDER}"


def missing_rule(text: str, kind: str, repository: Path) -> str:
    """Where it was looked for."""
    what = "no such file" if kind == "data" else "no such folder"
    return (
        what if os.path.isabs(text) else f"{what} here" + (f" or in {repository}" if repository != Path.cwd() else "")
    )


def looks_local(text: str, kind: str, repository: Path) -> bool:
    """Whether a name that does not exist here was meant as a path and not as a name on the hub (owner/name)."""
    if text.startswith((".", "/", "~", "\\")) or "\\" in text or text.count("/") > 1 or ":" in text:
        return True
    if kind == "data" and (text.lower().endswith(DATA_SUFFIXES) or "/" not in text):
        return True
    first = text.split("/")[0]
    return "/" in text and any((base / first).is_dir() for base in (Path.cwd(), repository, REPOSITORY))


def missing_fix(text: str, kind: str, repository: Path) -> str:
    """The nearest file in the folder that was named."""
    from difflib import get_close_matches

    wanted = Path(text)
    for base in (Path.cwd(), repository, REPOSITORY):
        folder = base / wanted.parent
        if folder.is_dir():
            close = get_close_matches(wanted.name, [p.name for p in folder.iterdir()], n=1, cutoff=0.5)
            if close:
                return f"did you mean {wanted.parent / close[0]}?"
    what = "a file" if kind == "data" else MODEL_FOLDER
    return f"write the path of {what}"
