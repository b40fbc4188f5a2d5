"""Findings and their table; checks that cannot hide each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from quickstart.doctor.finding import (
    Finding,
    error,
    has_error,
    note,
    ok,
    raise_errors,
    summary,
    table,
    to_mapping,
    warning,
)
from quickstart.doctor.running import Blocked, Check, fact, run_checks
from quickstart.errors import Fault, UserError

BAD = error("size", "3", "write 4", field="rl.size", rule="must be even")


def test_a_warning_without_a_way_out_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="must say what to do"):
        Finding(check="size", state="warning", found="3")


def test_errors_become_one_user_error_with_field_value_and_fix() -> None:
    with pytest.raises(UserError) as caught:
        raise_errors([ok("a", "fine"), BAD, warning("b", "odd", "look"), error("no field", "5", "write 6")])
    message = caught.value.render()
    assert "2 problems" in message
    assert "rl.size: found 3; must be even\n    fix: write 4" in message
    assert "no field: found 5" in message


def test_warnings_stop_nobody() -> None:
    raise_errors([ok("a", "fine"), note("b", "so"), warning("c", "odd", "look")])
    assert not has_error([warning("c", "odd", "look")])
    assert has_error([BAD])


def test_the_table_has_every_state_check_and_text() -> None:
    text = table([ok("a", "fine"), BAD, note("网络", "镜像在用")], 100)
    for part in ("state", "what to do", "rl.size: 3; must be even", "write 4", "网络", "镜像在用"):
        assert part in text
    assert max(len(line) for line in text.splitlines()) <= 100


def test_a_file_name_cannot_move_the_cursor() -> None:
    assert "\x1b" not in table([ok("a", "bad\x1b[2Jname")], 80)


def test_summary_counts_in_words() -> None:
    assert summary([ok("a", "1"), ok("b", "2"), BAD]) == "2 ok, no notes, no warnings, 1 error"


def test_json_has_the_same_keys_for_all() -> None:
    first, second = to_mapping([ok("a", "1"), BAD])
    assert first.keys() == second.keys() == {"check", "state", "found", "rule", "fix", "field", "data"}


def look_fails() -> Iterator[Finding]:
    yield ok("third", "half of it")
    raise ZeroDivisionError("three\nfour")


def test_every_check_runs_whatever_the_others_do() -> None:
    def refused() -> Iterator[Finding]:
        raise UserError(
            [Fault(field="a", found="1", rule="r", fix="f"), Fault(field="b", found="2", rule="r", fix="f")]
        )
        yield

    def blocked() -> Iterator[Finding]:
        raise Blocked("model folder")
        yield

    checks = [Check("first", refused), Check("second", blocked), Check("third", look_fails)]
    found = run_checks([*checks, Check("last", lambda: [ok("last", "seen")])])
    assert [(f.check, f.state) for f in found] == [
        ("first", "error"),
        ("first", "error"),
        ("second", "note"),
        ("third", "ok"),
        ("third", "warning"),
        ("last", "ok"),
    ]
    assert found[2].found == "not looked at: it needs the model folder, see above"
    assert "ZeroDivisionError: three (test_doctor_finding.py:" in found[4].found


class Things:
    """Facts that depend on each other."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {}
        self.failed: dict[str, str] = {}
        self.asked = 0

    @fact
    def good(self) -> int:
        self.asked += 1
        return 7

    @fact
    def bad_thing(self) -> int:
        raise UserError(Fault(field="x", found="1", rule="r", fix="f"))

    @fact
    def needs_bad(self) -> int:
        return self.bad_thing + 1


def test_a_fact_is_found_once_and_its_failure_is_told_once() -> None:
    things = Things()
    assert things.good + things.good == 14
    assert things.asked == 1
    with pytest.raises(UserError):
        things.bad_thing  # noqa: B018
    for _ in range(2):
        with pytest.raises(Blocked, match="bad thing"):
            things.needs_bad  # noqa: B018
