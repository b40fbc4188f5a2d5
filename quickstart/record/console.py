"""What the user sees: time-stamped lines, a progress bar on a terminal, one table of samples. Plain words, no colours.

Every text goes through Capture.draw, so no console encoding can stop a run. What a model wrote is shown without
control characters: an escape sequence in an answer must not move the cursor.
"""

from __future__ import annotations

import io
import time
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from quickstart.record.capture import Capture

TABLE_WIDTH = 110
CELL_CHARACTERS = 160
BAR_WIDTH = 24
ERASE_LINE = "\r\x1b[K"  # only where the bar is drawn, on a terminal


class Console:
    """Lines and the bar of one run."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._bar = ""  # what stands on the last line of the terminal, to be redrawn below a new line
        self._total = 0
        self._began = time.monotonic()
        capture.before_guest = self._erase  # what user code prints does not end up behind the bar

    def line(self, text: str) -> None:
        """One line with the time of day."""
        self._erase()
        self._capture.say(f"{time.strftime('%H:%M:%S')}  {text}")
        self._capture.draw(self._bar)

    def block(self, text: str) -> None:
        """Several lines as they are."""
        self._erase()
        self._capture.say(text)
        self._capture.draw(self._bar)

    def begin(self, total_steps: int) -> None:
        """The bar starts here. Not drawn where nobody watches."""
        self._total, self._began = total_steps, time.monotonic()

    def progress(self, step: int) -> None:
        """Move the bar to `step` finished steps."""
        if not (self._total and self._capture.is_tty):
            return
        self._erase()
        left = (time.monotonic() - self._began) / max(step, 1) * (self._total - step)
        self._bar = bar_text(step, self._total, left, fancy=self._capture.encoding.startswith("utf"))
        self._capture.draw(self._bar)

    def end(self) -> None:
        """Take the bar away."""
        self._erase()
        self._bar, self._total = "", 0

    def samples(self, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """A table of prompt, response and reward."""
        self.block(sample_table(title, rows))

    def _erase(self) -> None:
        if self._bar:
            self._capture.draw(ERASE_LINE)


def bar_text(step: int, total: int, seconds_left: float, *, fancy: bool) -> str:
    """step 3/10 [#######       ] 0:42 left"""
    full = round(BAR_WIDTH * min(step / total, 1))
    done, rest = ("█", "░") if fancy else ("#", "-")
    minutes, seconds = divmod(int(seconds_left), 60)
    return f"step {step}/{total} {done * full}{rest * (BAR_WIDTH - full)} about {minutes}:{seconds:02d} left"


def sample_table(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Prompt, response and reward as text, under a title."""
    columns = (("prompt", 2), ("response", 3), ("reward", 0))
    cells = [(printable(row["prompt"]), printable(row["response"]), reward_text(row["reward"])) for row in rows]
    return f"{title}\n{text_table(columns, cells)}"


def text_table(columns: Sequence[tuple[str, int]], rows: Sequence[Sequence[str]]) -> str:
    """Lines of characters that every terminal has; rich counts the columns that Chinese characters take.

    Args:
        columns: name, and share of the width; 0: as wide as its numbers.
        rows: a text for each column.
    """
    from rich.box import Box
    from rich.console import Console as RichConsole
    from rich.table import Table
    from rich.text import Text

    table = Table(box=Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True), width=TABLE_WIDTH)
    for name, share in columns:
        table.add_column(
            name,
            ratio=share or None,
            overflow="fold",
            justify="left" if share else "right",
            no_wrap=not share,
        )
    for row in rows:
        table.add_row(*(Text(text) for text in row))
    out = io.StringIO()
    RichConsole(file=out, width=TABLE_WIDTH, force_terminal=False, no_color=True, legacy_windows=False).print(table)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    return "\n".join(line for line in lines if line)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows as columns, two blanks apart; the last column runs free."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    cells = [[*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[-1]] for row in rows]
    return "\n".join("  " + "  ".join(row).rstrip() for row in cells)


def reward_text(reward: Any) -> str:
    """Two decimals; a reward that is missing stands as a dash."""
    return "-" if reward is None else f"{float(reward):.2f}"


def printable(value: Any) -> str:
    """One line of visible characters, cut when long. Chat messages become their texts."""
    text = value if isinstance(value, str) else " ".join(str(message["content"]) for message in value)
    text = "".join(c for c in text if c.isspace() or unicodedata.category(c) not in ("Cc", "Cf", "Cs"))
    text = " ".join(text.split())
    return text if len(text) <= CELL_CHARACTERS else text[: CELL_CHARACTERS - 3] + "..."
