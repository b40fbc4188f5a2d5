"""The one error root and the exit codes. Not here: any check; the rooms raise, `run` prints.

A user's mistake is a :class:`UserError` with one or more :class:`Fault`: field, value found, rule, fix. It ends the
command with exit code 2 and without a traceback. Anything else that escapes is our bug (exit code 1).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

EXIT_DONE = 0
EXIT_BUG = 1
EXIT_USER = 2
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that the user can fix."""

    field: str  # where: a config key (`rl.learning_rate`) or a file and line (`train.jsonl:7`)
    found: str  # what stands there now
    rule: str  # what must hold
    fix: str  # what to do, as an instruction

    def render(self) -> str:
        """Two lines: the fault, then the way out."""
        return f"{self.field}: found {self.found}; {self.rule}\n    fix: {self.fix}"


class QuickstartError(Exception):
    """Root of every error that this package raises on purpose."""


class UserError(QuickstartError):
    """The user can fix this. Carries all faults that were found, not only the first."""

    def __init__(self, faults: Iterable[Fault] | Fault) -> None:
        self.faults = (faults,) if isinstance(faults, Fault) else tuple(faults)
        assert self.faults, "a UserError without a fault says nothing"
        super().__init__(self.render())

    def render(self) -> str:
        """The whole message, as `run` prints it."""
        count = len(self.faults)
        head = "1 problem" if count == 1 else f"{count} problems"
        return "\n".join([f"error: {head}, nothing was started", *(f"  - {f.render()}" for f in self.faults)])


class RunError(UserError):
    """A user's mistake that shows only while training (a reward that raises): what was done is kept."""

    def render(self) -> str:
        """As UserError, but the run had begun."""
        return "\n".join(["error: the run was stopped", *(f"  - {f.render()}" for f in self.faults)])


@contextlib.contextmanager
def permitted() -> Iterator[None]:
    """While looking at what a user named: a path that this user may not look at is a UserError, wherever it is met."""
    try:
        yield
    except PermissionError as error:
        if error.filename is None:
            raise
        raise UserError(
            Fault(
                field=str(error.filename),
                found=error.strerror or "no permission",
                rule="it must be readable for you, and so must each folder above it",
                fix=f"name another one, or ask its owner to allow it (ls -ld {error.filename})",
            )
        ) from error
