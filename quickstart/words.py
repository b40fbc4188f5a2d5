"""Words that messages share."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """1 step, 5 steps, 1000 steps. plural: where it is not noun + s."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
