"""Is a row of use for what it is wanted for: rollouts, preference pairs or labelled answers.

What is missing or of the wrong kind is a fault (the file is not what it is taken for); what is well formed but useless
(empty, identical, not writable as UTF-8) is left out by name. Not here: lengths, which need the tokenizer (lengths.py).
"""

from __future__ import annotations

import re
from typing import Literal

from quickstart.data.rows import Row, RowDrop, RowFault
from quickstart.data.shapes import nearest_column

Purpose = Literal["read", "rollouts", "pairs", "labelled"]

SURROGATE = re.compile("[\ud800-\udfff]")


def check_row(row: Row, purpose: Purpose, needs_answer: bool) -> None:
    """Raise what is wrong with a row, nothing where it is good.

    Args:
        purpose: what the row is for; "read" asks no more than a sound prompt.
        needs_answer: whether rollouts are rewarded by comparison with `chosen` or `answer`.

    Raises:
        RowFault, RowDrop: see the module.
    """
    _check_prompt(row)
    texts = {"chosen": row.chosen, "rejected": row.rejected, "answer": row.answer, "data_source": row.data_source}
    for name, text in texts.items():
        if text is not None:
            _check_writable(text, name)
    if purpose == "pairs" or (purpose == "labelled" and row.label is None):
        _check_pair(row, required=True, purpose=purpose)
    elif purpose == "labelled":
        _check_answer(row.answer, "completion")
    elif purpose == "rollouts" and needs_answer:
        _check_reference(row)


def _check_prompt(row: Row) -> None:
    messages = row.prompt_messages
    if not messages:
        raise RowFault(found="prompt []", rule="a prompt must hold a message", fix="write the question as text")
    for message in messages:
        _check_writable(message["content"], "prompt")
    last = messages[-1]["role"]
    if last not in ("user", "tool"):
        rule = "a prompt must end with a user message, for the model to answer"
        fix = "to split the last answer off by itself, call the column messages (data.columns.messages=prompt)"
        raise RowFault(found=f"last role {last}", rule=rule, fix=fix)
    if not messages[-1]["content"].strip():
        raise RowDrop("the prompt is empty")


def _check_writable(text: str, name: str) -> None:
    if text.isascii():
        if "\0" in text:
            raise RowDrop(f"NUL character in {name}")
        return
    if "\0" in text:
        raise RowDrop(f"NUL character in {name}")
    if SURROGATE.search(text):
        raise RowDrop(f"half a surrogate pair in {name} (no legal character)")


def _check_pair(row: Row, *, required: bool, purpose: str) -> None:
    for name, text in (("chosen", row.chosen), ("rejected", row.rejected)):
        if text is None and required:
            raise _missing(row, name, purpose)
        if text is not None and not text.strip():
            raise RowDrop(f"{name} is empty")
    if row.chosen is not None and row.chosen == row.rejected:
        raise RowDrop("chosen and rejected are identical")


def _check_reference(row: Row) -> None:
    """The reward `preference` compares with chosen (or the only answer), and with rejected where there is one."""
    if row.chosen is None and row.answer is None:
        rule = "the reward `preference` compares answers with `chosen`"
        fix = f"{_name_column(row, 'chosen', 'answer')}, or choose another rl.reward"
        raise RowFault(found=_columns(row), rule=rule, fix=fix)
    if row.chosen is None:
        _check_answer(row.answer, "answer")
    _check_pair(row, required=False, purpose="rollouts")


def _check_answer(text: str | None, name: str) -> None:
    if text is None:
        raise RowFault(found=f"{name} null", rule=f"{name} must be text", fix="write the answer, or remove the row")
    if not text.strip():
        raise RowDrop(f"{name} is empty")


def _missing(row: Row, name: str, purpose: str) -> RowFault:
    if row.answer is not None and purpose == "labelled":
        rule, fix = "KTO needs a label for each answer", _name_column(row, "label")
        return RowFault(found=_columns(row), rule=rule, fix=fix)
    rule = f"`{name}` must be there: this rl_type learns from chosen and rejected answers"
    return RowFault(found=_columns(row), rule=rule, fix=f"{_name_column(row, name)}, or remove the row")


def _name_column(row: Row, *names: str) -> str:
    """How to say which column is meant: the one that resembles a name, or a blank to fill in."""
    for name in names:
        guess = nearest_column(name, row.extra)
        if guess is not None:
            return f"did you mean {guess}? set data.columns.{name}={guess}"
    return f"name the column (data.columns.{names[0]}=...)"


def _columns(row: Row) -> str:
    """What the row has, for messages."""
    have = {"chosen": row.chosen, "rejected": row.rejected, "answer": row.answer, "label": row.label}
    names = ["prompt", *(name for name, value in have.items() if value is not None), *map(str, row.extra)]
    text = ", ".join(names)
    return text if len(text) <= 80 else text[:77] + "..."
