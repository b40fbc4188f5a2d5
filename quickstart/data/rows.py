"""The row that every format and shape ends in, and the two ways in which a row can be bad.

Not here: how a row is read (read.py), recognised (shapes.py) or checked (check.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Message = dict[str, str]  # {"role": ..., "content": ...}, both text


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What one line, array element or table row holds, before anybody knows what it means."""

    value: Any
    line: int  # 1-based: the line in a text file, the row in a table


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One checked example. Texts are as they stand in the file."""

    prompt_messages: list[Message]  # the conversation up to the answer
    chosen: str | None = None  # the better answer
    rejected: str | None = None  # the worse answer
    answer: str | None = None  # the only answer: {prompt, completion}, {question, answer}, a ground truth
    label: bool | None = None  # whether `answer` is a good one; None: not said
    data_source: str | None = None  # names verl's built-in scorer; only verl's own rows have it
    file: str
    line: int  # 1-based
    extra: dict[str, Any] = field(default_factory=dict)  # columns that the shape does not use, as they are


class RowFault(Exception):  # noqa: N818  (one row's part of a UserError)
    """The row is not what the file claims to hold: the run is refused, once all rows have been looked at."""

    def __init__(self, *, found: str, rule: str, fix: str) -> None:
        super().__init__(rule)
        self.found, self.rule, self.fix = found, rule, fix


class RowDrop(Exception):  # noqa: N818  (not an error)
    """The row is well formed but of no use: it is left out, and named."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def printable(text: str) -> str:
    """The text with half surrogate pairs written out, which no terminal and no file takes."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def shown(value: Any, limit: int = 60) -> str:
    """A value for a message, cut when long."""
    text = (
        {None: "null", True: "true", False: "false"}[value]
        if value is None or value is True or value is False
        else repr(value)
    )
    return text if len(text) <= limit else text[: limit - 3] + "..."
