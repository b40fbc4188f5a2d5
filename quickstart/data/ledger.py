"""The account of a reading: rows in = rows out + rows named. Collects faults, drops and remarks, first ten places each.

Not here: any rule. A fault refuses the run (one UserError with all kinds of faults), a drop leaves one row out.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from quickstart.data.rows import RowFault, printable
from quickstart.errors import Fault, UserError
from quickstart.words import counted

NAMED = 10  # places that are written out for each kind


@dataclass(slots=True)
class Places:
    """How often something was met, and where first."""

    count: int = 0
    first: list[tuple[str, int]] = field(default_factory=list)

    def add(self, file: str, line: int) -> None:
        """One more."""
        self.count += 1
        if len(self.first) < NAMED:
            self.first.append((file, line))

    def render(self) -> str:
        """`a.jsonl:3, 7, b.jsonl:1 and 12 more`. Rows of one line (a list in it) are named once."""
        parts: list[str] = []
        before = None
        for file, line in dict.fromkeys(self.first):
            parts.append(str(line) if file == before else f"{file}:{line}")
            before = file
        more = self.count - len(self.first)
        return ", ".join(parts) + (f" and {more} more" if more else "")

    def others(self) -> str:
        """The same without the first place, for a message that has named it."""
        (file, line), *_ = self.first
        return self.render().removeprefix(f"{file}:{line}").removeprefix(", ").strip()


@dataclass(slots=True)
class Ledger:
    """What happened to the rows of one reading."""

    rows_read: int = 0  # good or bad
    rows_kept: int = 0
    dropped: dict[str, Places] = field(default_factory=dict)  # reason -> where
    remarks: dict[str, Places] = field(default_factory=dict)  # what was understood in another way than written
    faults: dict[str, tuple[RowFault, Places]] = field(default_factory=dict)  # rule -> first of its kind, where
    general: list[Fault] = field(default_factory=list)  # about a file or a setting, not about a row
    notes: list[str] = field(default_factory=list)  # the same, harmless

    def fault(self, problem: RowFault, file: str, line: int) -> None:
        """A row that refuses the run."""
        self.faults.setdefault(problem.rule, (problem, Places()))[1].add(file, line)

    def lost(self, problem: RowFault, file: str, line: int) -> None:
        """A row that could not even be taken from its file."""
        self.rows_read += 1
        self.fault(problem, file, line)

    def drop(self, reason: str, file: str, line: int) -> None:
        """A row that is left out."""
        self.dropped.setdefault(reason, Places()).add(file, line)

    def remark(self, text: str, file: str, line: int) -> None:
        """A row that was understood, but not as plainly written."""
        self.remarks.setdefault(text, Places()).add(file, line)

    @property
    def has_faults(self) -> bool:
        """Whether the run is refused."""
        return bool(self.general or self.faults)

    def raise_faults(self) -> None:
        """Raise one UserError with every fault so far, one entry for each kind; nothing where there are none."""
        faults = self.general + [_row_fault(problem, places) for problem, places in self.faults.values()]
        if faults:
            raise UserError(_clean(fault) for fault in faults)

    def raise_empty(self, field_name: str, files: str) -> None:
        """Raise when no row is left, with the reasons."""
        if self.rows_kept:
            return
        reasons = "; ".join(f"{reason}: {places.render()}" for reason, places in self.dropped.items())
        found = (
            f"{files}: 0 of {counted(self.rows_read, 'row')} can be used" if self.rows_read else f"{files}: no records"
        )
        fix = "correct these rows or name another file" if self.rows_read else "name a file with rows in it"
        rule = f"at least one row must be left ({reasons})" if reasons else "the file has no records"
        raise UserError(_clean(Fault(field=field_name, found=found, rule=rule, fix=fix)))

    def notices(self) -> list[str]:
        """One line for each reason, each note and each remark."""
        left_out = [
            f"{places.count} of {counted(self.rows_read, 'row')} left out, {reason}: {places.render()}"
            for reason, places in self.dropped.items()
        ]
        understood = []
        for text, places in self.remarks.items():
            file, line = places.first[0]
            understood.append(f"{text} ({counted(places.count, 'row')}, first {file}:{line})")
        return [printable(line) for line in left_out + self.notes + understood]


def _clean(fault: Fault) -> Fault:
    """Column names and file names come from outside and may hold what cannot be printed."""
    return Fault(**{name: printable(text) for name, text in asdict(fault).items()})


def _row_fault(problem: RowFault, places: Places) -> Fault:
    file, line = places.first[0]
    others = f" (in {places.count} rows, also: {places.others()})" if places.others() else ""
    return Fault(field=f"{file}:{line}", found=problem.found, rule=problem.rule + others, fix=problem.fix)
