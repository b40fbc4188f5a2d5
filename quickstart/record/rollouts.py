"""rollouts/rollout_000000.jsonl: what was asked, what was answered, what it was worth. One JSON object a line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quickstart.writing import plain, without_nonfinite, write_json_lines

FIRST = (
    "prompt",
    "response",
    "reward",
    "step",
    "uid",
    "ground_truth",
    "prompt_length",
    "response_length",
    "finish_reason",
)


def write_rollouts(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write the rows of one step, keys in the order of FIRST, others after them. Replaces the file whole.

    A number that is not finite becomes null and its name is listed under `nonfinite`: the lines stay valid JSON.
    """
    write_json_lines(path, [ordered(row) for row in rows])


def ordered(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with the known keys first."""
    keys = [*(key for key in FIRST if key in row), *(key for key in row if key not in FIRST)]
    numbers, lost = without_nonfinite({key: row[key] for key in keys if is_number(row[key])})
    values = {key: numbers.get(key, row[key]) for key in keys}
    return {**values, "nonfinite": lost} if lost else values


def is_number(value: Any) -> bool:
    """Python's and numpy's numbers; true and false are none."""
    import numbers

    return isinstance(value, numbers.Real) and not isinstance(value, bool) and plain(value) is not None
