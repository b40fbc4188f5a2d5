"""What to say when the fault is ours: one line, and a file with everything. Not here: mistakes of the user."""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

from quickstart.outputs import CLAIMED, LOG, LOGS


def report_bug(error: BaseException, arguments: Sequence[str]) -> Path:
    """Write the traceback to the run's log, or to a file of its own before there is one. Prints one line and a path."""
    text = "".join(traceback.format_exception(error))
    path = append(text, arguments)
    if "--debug" in arguments:
        print(text, file=sys.stderr)
    print(f"this is a bug in quickstart: {type(error).__name__}: {first_line(error)}", file=sys.stderr)
    print(f"    the whole story is in {path}; --debug shows it here", file=sys.stderr)
    return path


def append(text: str, arguments: Sequence[str]) -> Path:
    """To the log of the run that failed, else to a new temporary file."""
    log = CLAIMED[-1] / LOGS / LOG if CLAIMED else None
    if log is None or not log.parent.is_dir():
        with tempfile.NamedTemporaryFile(
            "w", prefix="quickstart-", suffix=".log", delete=False, encoding="utf-8"
        ) as new:
            log = Path(new.name)
    with open(log, "a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"command: {' '.join(arguments)}\n{text}")
    return log


def first_line(error: BaseException) -> str:
    """The message, cut to a line."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else "no message"
