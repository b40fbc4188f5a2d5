"""What a check says: state, what was found, what to do; and the ways to show a list of them.

Not here: any check. A finding that is an error is a Fault of a UserError for whoever must stop on it.
"""

from __future__ import annotations

import dataclasses
import io
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quickstart.errors import Fault, UserError

State = Literal["ok", "note", "warning", "error"]
STATES: tuple[State, ...] = ("ok", "note", "warning", "error")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the table."""

    check: str  # what was looked at
    state: State  # note: good to know; warning: runs, perhaps not as wished; error: must not start
    found: str  # what is there
    rule: str = ""  # what should hold, where it does not
    fix: str = ""  # what to do, as an instruction
    field: str = ""  # the setting that is concerned, `section.key`
    data: dict[str, Any] | None = None  # the numbers behind it, for JSON

    def __post_init__(self) -> None:
        assert self.state in ("ok", "note") or self.fix, f"{self.check}: a {self.state} must say what to do"

    @property
    def text(self) -> str:
        """Field, what was found and the rule, as one sentence."""
        head = f"{self.field}: " if self.field else ""
        return f"{head}{self.found}" + (f"; {self.rule}" if self.rule else "")

    def fault(self) -> Fault:
        """As an entry of a UserError."""
        rule = self.rule or f"the check `{self.check}` refuses it"
        return Fault(field=self.field or self.check, found=self.found, rule=rule, fix=self.fix)


def ok(check: str, found: str) -> Finding:
    """All is well."""
    return Finding(check=check, state="ok", found=found)


def note(check: str, found: str, fix: str = "", *, field: str = "", rule: str = "") -> Finding:
    """Good to know."""
    return Finding(check=check, state="note", found=found, rule=rule, fix=fix, field=field)


def warning(check: str, found: str, fix: str, *, field: str = "", rule: str = "") -> Finding:
    """Runs, but perhaps not as wished."""
    return Finding(check=check, state="warning", found=found, rule=rule, fix=fix, field=field)


def error(check: str, found: str, fix: str, *, field: str = "", rule: str = "") -> Finding:
    """Must not start."""
    return Finding(check=check, state="error", found=found, rule=rule, fix=fix, field=field)


def from_fault(check: str, fault: Fault) -> Finding:
    """A fault that another room has found."""
    return error(check, fault.found, fault.fix, field=fault.field, rule=fault.rule)


def raise_errors(findings: Iterable[Finding]) -> None:
    """Raise one UserError with every error among the findings; nothing where there are none."""
    faults = [finding.fault() for finding in findings if finding.state == "error"]
    if faults:
        raise UserError(faults)


def has_error(findings: Iterable[Finding]) -> bool:
    """Whether one of them forbids the start."""
    return any(finding.state == "error" for finding in findings)


def counts(findings: Iterable[Finding]) -> dict[str, int]:
    """How many of each state, in the order of severity."""
    found = Counter(finding.state for finding in findings)
    return {state: found[state] for state in STATES}


def summary(findings: Sequence[Finding]) -> str:
    """One line: 21 checks ok, 3 notes, 1 warning, no error."""
    number = counts(findings)
    parts = [f"{number['ok']} ok"]
    parts += [f"{number[s] or 'no'} {s}{'' if number[s] == 1 else 's'}" for s in ("note", "warning", "error")]
    return ", ".join(parts)


def to_mapping(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """For JSON: every key in every entry."""
    return [dataclasses.asdict(finding) for finding in findings]


def table(findings: Sequence[Finding], width: int) -> str:
    """The findings as one table of `width` columns; rich counts the columns that Chinese characters take."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=box.ASCII2 if width < 60 else box.SIMPLE_HEAD, width=width, pad_edge=False)
    grid.add_column("state", no_wrap=True)
    grid.add_column("check", no_wrap=True)
    grid.add_column("what was found", ratio=3, overflow="fold")
    grid.add_column("what to do", ratio=2, overflow="fold")
    for finding in findings:
        cells = (finding.state, finding.check, finding.text, finding.fix)
        grid.add_row(*(Text(printable(cell)) for cell in cells))
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False, no_color=True, legacy_windows=False).print(grid)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines() if line.strip())


def printable(text: str) -> str:
    """Without control characters other than line ends: a file name must not move the cursor."""
    return "".join(c for c in text if c == "\n" or c.isprintable())
