"""Run every check to its end: one that fails, even by a bug of ours, never hides the others.

Not here: what is checked.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

from quickstart.doctor.finding import Finding, from_fault, note, warning
from quickstart.errors import UserError, permitted

T = TypeVar("T")
LABELS = {"cfg": "config"}  # of facts whose own name is no word


class Blocked(Exception):  # noqa: N818  (not an error: another check has reported it)
    """A check cannot look, because what it needs is not there; why is said elsewhere in the table."""


class fact(Generic[T]):  # noqa: N801  (used as a decorator, as functools.cached_property)
    """A property that is found out once. Where that fails, the first who asks gets the error, all others Blocked."""

    def __init__(self, find: Callable[[Any], T]) -> None:
        self._find, self._name = find, find.__name__
        self.__doc__ = find.__doc__

    @overload
    def __get__(self, owner: None, kind: type) -> fact[T]: ...
    @overload
    def __get__(self, owner: Any, kind: type) -> T: ...
    def __get__(self, owner: Any, kind: type) -> Any:
        if owner is None:
            return self
        known, failed = owner.known, owner.failed
        if self._name in failed:
            raise Blocked(failed[self._name])
        if self._name not in known:
            try:
                known[self._name] = self._find(owner)
            except Blocked as blocked:
                failed[self._name] = str(blocked)
                raise
            except Exception:
                failed[self._name] = LABELS.get(self._name, self._name.replace("_", " "))
                raise
        return known[self._name]


@dataclass(frozen=True)
class Check:
    """One row or more of the table."""

    name: str
    look: Callable[[], Iterable[Finding]]


def run_checks(checks: Iterable[Check]) -> list[Finding]:
    """What all of them found, in order; what a check found before it failed is kept."""
    findings: list[Finding] = []
    for check in checks:
        try:
            with permitted():
                for finding in check.look():
                    findings.append(finding)
        except UserError as refused:
            findings.extend(from_fault(check.name, fault) for fault in refused.faults)
        except Blocked as blocked:
            findings.append(note(check.name, f"not looked at: it needs the {blocked}, see above"))
        except Exception as failure:  # a bug in one check must not hide what the others found
            findings.append(broken(check.name, failure))
    return findings


def broken(name: str, failure: Exception) -> Finding:
    """A check that failed by itself: said, but it stops nobody."""
    frame = traceback.extract_tb(failure.__traceback__)[-1]
    place = f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}"
    first = (str(failure).strip().splitlines() or ["no message"])[0][:200]
    found = f"this check failed itself: {type(failure).__name__}: {first} ({place})"
    return warning(name, found, "it is a bug of quickstart's or of a broken package; the other checks hold")
