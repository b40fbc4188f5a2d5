"""Which files `data.train_file` names: a file, a list, a glob, a folder, or a data set on the hub.

Not here: what is in them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import Literal

from quickstart.config.paths import REPOSITORY, looks_local, missing_fix
from quickstart.data import text
from quickstart.data.ledger import Ledger
from quickstart.data.rows import printable
from quickstart.errors import Fault

Kind = Literal["json", "csv", "parquet", "arrow", "hub"]
SUFFIXES: dict[str, Kind] = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
MAGIC: tuple[tuple[bytes, Kind], ...] = ((b"PAR1", "parquet"), (b"ARROW1", "arrow"))
LFS_HEAD = b"version https://git-lfs"
ZIP_HEAD = b"PK\x03\x04"
# JSON files in a data set's folder that describe it and hold no rows.
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
HELD_OUT = frozenset(("test", "valid", "validation", "val", "dev", "eval"))


@dataclass(frozen=True, kw_only=True)
class Source:
    """One file, or one split of a hub data set, to read."""

    kind: Kind
    path: Path  # of a hub data set: its name
    name: str  # for messages


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """How one setting names its files."""

    setting: str  # data.train_file or data.eval_file, for messages
    names: list[str]
    split: str | None  # data.split


def expand(wanted: Wanted, ledger: Ledger) -> list[Source]:
    """The sources behind a setting, in order. What cannot be found is a fault in the ledger."""
    if not wanted.names:
        ledger.general.append(_fault(wanted, "an empty list", "there must be a file to read", "name a file"))
    sources = [source for name in wanted.names for source in _expand_one(name, wanted, ledger)]
    if wanted.split and sources and all(Path(name).is_file() for name in wanted.names):
        ledger.notes.append(f"data.split={wanted.split} is not used: the data are plain files")
    return sources


def _fault(wanted: Wanted, found: str, rule: str, fix: str) -> Fault:
    return Fault(field=wanted.setting, found=found, rule=rule, fix=fix)


def _expand_one(name: str, wanted: Wanted, ledger: Ledger) -> list[Source]:
    path = Path(name).expanduser()
    if path.is_dir():
        return _folder(path, wanted, ledger)
    if path.exists():
        return _files([path], ledger)
    if has_magic(name):
        matches = [match for match in map(Path, sorted(glob(str(path), recursive=True))) if match.is_file()]
        if not matches:
            fix = f"check the pattern; {missing_fix(name, 'data', REPOSITORY)}"
            ledger.general.append(_fault(wanted, name, "no file matches the pattern", fix))
        return _files(matches, ledger)
    if looks_local(name, "data", REPOSITORY):
        fix = missing_fix(name, "data", REPOSITORY)
        ledger.general.append(_fault(wanted, name, "no such file", fix))
        return []
    return [Source(kind="hub", path=Path(name), name=name)]


def _files(paths: list[Path], ledger: Ledger) -> list[Source]:
    sources = []
    for path in paths:
        kind = _kind(path)
        if isinstance(kind, Fault):
            ledger.general.append(kind)
        else:
            sources.append(Source(kind=kind, path=path, name=printable(str(path))))
    return sources


def suffix_of(path: Path) -> str:
    """The suffix that says what the file is: lower case, without .gz."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def _kind(path: Path) -> Kind | Fault:
    """What the file is: by its first bytes where they are telling, else by its suffix."""
    try:
        with text.open_bytes(path) as file:
            head = file.read(len(LFS_HEAD))
    except PermissionError:
        return Fault(field=str(path), found="no permission", rule="it must be readable", fix=f"chmod u+r {path}")
    except text.DAMAGED as error:
        return text.damaged(str(path), error)
    if head == LFS_HEAD:
        rule, fix = "the data must be there, not a pointer to it", "run `git lfs pull` in that folder"
        return Fault(field=str(path), found="a Git LFS pointer", rule=rule, fix=fix)
    by_content = next((kind for magic, kind in MAGIC if head.startswith(magic)), None)
    kind = by_content or SUFFIXES.get(suffix_of(path))
    if head.startswith(ZIP_HEAD) or kind is None:
        found = "a zip archive" if head.startswith(ZIP_HEAD) else f"suffix {suffix_of(path) or 'none'}"
        rule = f"the file must be one of {', '.join(SUFFIXES)}, each also .gz"
        fix = f"unpack it: unzip {path}" if head.startswith(ZIP_HEAD) else "convert it, or correct its suffix"
        return Fault(field=str(path), found=found, rule=rule, fix=fix)
    if kind == "parquet" and not by_content and head:
        rule, fix = "a parquet file begins with PAR1", "copy or download it again"
        return Fault(field=str(path), found=f"it begins with {head[:8]!r}", rule=rule, fix=fix)
    return kind


def _folder(path: Path, wanted: Wanted, ledger: Ledger) -> list[Source]:
    """The data files of a folder: of a saved data set in its own order, else all, held-out ones set aside."""
    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        split = wanted.split or "train"
        if split not in splits:
            fix = f"set data.split={splits[0]}"
            ledger.general.append(_fault(wanted, f"{path} with splits {', '.join(splits)}", f"no split {split}", fix))
            return []
        return _folder(path / split, wanted, ledger)
    if (path / "state.json").is_file():
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        return _files([path / entry["filename"] for entry in state["_data_files"]], ledger)
    found = [file for file in sorted(path.rglob("*")) if _is_data(file, path)]
    if not found:
        here = ", ".join(sorted(file.name for file in path.iterdir())[:5]) or "nothing"
        fix = f"name a folder with files {', '.join(SUFFIXES)}"
        ledger.general.append(_fault(wanted, f"{path} (in it: {here})", "the folder holds no data file", fix))
    return _files(_of_split(found, path, wanted, ledger), ledger)


def _is_data(file: Path, folder: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return not hidden and suffix_of(file) in SUFFIXES and file.name not in DESCRIPTIONS and file.is_file()


def _of_split(found: list[Path], folder: Path, wanted: Wanted, ledger: Ledger) -> list[Path]:
    """The files of data.split by their names; without one, all but those named like held-out data."""
    words = {file: set(re.split(r"[^a-z]+", str(file.relative_to(folder)).lower())) for file in found}
    if wanted.split:
        chosen = [file for file in found if wanted.split.lower() in words[file]]
        if found and not chosen:
            names = ", ".join(file.name for file in found[:5])
            fix = "leave data.split out, or name the files"
            ledger.general.append(_fault(wanted, f"{folder} with {names}", f"no file named {wanted.split}", fix))
        return chosen
    kept = [file for file in found if not words[file] & HELD_OUT] or found
    if len(kept) < len(found):
        names = ", ".join(file.name for file in found if file not in kept)
        ledger.notes.append(f"{folder}: not read, because named like held-out data: {names} (data.split chooses)")
    return kept
