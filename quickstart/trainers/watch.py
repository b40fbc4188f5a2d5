"""What every trainer shares with the rest of a run: whom it tells, how it is stopped, when it stops by itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from quickstart.errors import Fault, RunError

NON_FINITE_LIMIT = 3  # updates in a row that verl skipped (transformer_impl.py:822) before the run is stopped


class Reporter(Protocol):
    """What a trainer tells about a run; `record.Recorder` writes it down."""

    def phase(self, text: str) -> None: ...
    def rollout(self, step: int, rows: list[dict[str, Any]]) -> None: ...
    def update(self, step: int, epoch: float, metrics: dict[str, float]) -> None: ...
    def evaluation(self, step: int, epoch: float, metrics: dict[str, float], rows: list[dict[str, Any]]) -> None: ...
    def saved(self, step: int, path: Path) -> None: ...


class StopRequested(Exception):  # noqa: N818  (not an error)
    """The user asked to stop; raised between two steps, with everything of the last one recorded."""


class GradientWatch:
    """Ends a run whose gradients stay non-finite. verl skips each such update in silence.

    Args:
        names: metrics that hold gradient norms.
        remedy: what the user can do.
    """

    def __init__(self, names: tuple[str, ...], remedy: str) -> None:
        self._names, self._remedy = names, remedy
        self._skipped = 0

    def look(self, step: int, metrics: Mapping[str, float]) -> None:
        """After each step. Raises RunError after NON_FINITE_LIMIT skipped updates in a row."""
        norms = {name: metrics[name] for name in self._names if name in metrics}
        broken = {name: norm for name, norm in norms.items() if not math.isfinite(norm)}
        self._skipped = self._skipped + 1 if broken else 0
        if self._skipped >= NON_FINITE_LIMIT:
            raise RunError(
                Fault(
                    field=f"step {step}: {', '.join(broken)}",
                    found=", ".join(str(norm) for norm in broken.values()),
                    rule=f"gradients were not finite in {NON_FINITE_LIMIT} steps in a row; verl skips such updates",
                    fix=self._remedy,
                )
            )
