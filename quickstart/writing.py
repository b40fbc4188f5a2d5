"""Write files whole or not at all, and JSON that every reader accepts.

A file is written to a temporary name beside its place and renamed, so a reader never sees half of one and a full disk
never costs the version before. Not here: which files a run writes (:mod:`quickstart.outputs`).
"""

from __future__ import annotations

import errno
import json
import math
import numbers
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quickstart.errors import Fault, RunError

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
# Lone surrogates cannot be UTF-8, and some readers take the others for line ends inside a JSON line.
UNSAFE = re.compile("[\ud800-\udfff\u0085\u2028\u2029]")


def write_atomic(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Replace the file at `path`. durable: also wait until the disk has it (slow; for what ends a run).

    Raises RunError when the disk is full.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if error.errno in FULL_DISK:
            raise full_disk(path, len(data)) from None
        raise


def full_disk(path: Path, wanted_bytes: int) -> RunError:
    """What to say when the disk is full."""
    return RunError(
        Fault(
            field=str(path),
            found=f"no room for {wanted_bytes:,} bytes",
            rule="the disk of training.output_dir is full",
            fix=f"free some space there, or set training.output_dir to another disk (old runs: {path.parent}/history)",
        )
    )


def to_json(value: Any, *, indent: int | None = None) -> str:
    """JSON text, Chinese readable. A number that is not finite raises ValueError: use `without_nonfinite` first."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent, default=plain)
    return UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def plain(value: Any) -> Any:
    """What json does not know: numpy numbers, paths, sets."""
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, (set, frozenset, tuple)):
        return sorted(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no place in a record")


def without_nonfinite(metrics: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Metrics as plain numbers, nan and inf as None, and the names of those."""
    clean: dict[str, Any] = {}
    lost: list[str] = []
    for name, value in metrics.items():
        number = value if isinstance(value, int) else float(value)
        if isinstance(number, float) and not math.isfinite(number):
            lost.append(name)
            clean[name] = None
        else:
            clean[name] = number
    return clean, lost


def write_json(path: Path, value: Any, *, durable: bool = False) -> None:
    """One JSON document, indented."""
    write_atomic(path, to_json(value, indent=2) + "\n", durable=durable)


def write_json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """One JSON object a line."""
    write_atomic(path, "".join(to_json(row) + "\n" for row in rows))
