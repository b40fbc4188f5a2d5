"""What is written for each purpose: the columns of the parquet file, and a row's place in them.

rollouts: verl's own row format (verl/utils/dataset/rl_dataset.py, trainer/ppo/reward.py)

    data_source   text; verl's scorers go by it
    prompt        [{role, content}, ...]
    ability       text
    reward_model  {style: "rule", ground_truth: text}         chosen, or the only answer
    extra_info    {index, prompt, chosen, rejected, label, file, line, row}    row: all other columns, as JSON text

verl passes a reward function extra_info and not the prompt, so the prompt stands in both.
The other columns travel as JSON text because a table column has one type and rows do not: parquet would turn 4 beside
4.5 into 4.0 and fill in keys that other rows have. The reward guard (rewards/guard.py) unpacks them again.

pairs: {prompt, chosen, rejected, file, line}. labelled: {prompt, completion, label, file, line}.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quickstart.data.rows import Row

DEFAULT_SOURCE = "quickstart"  # data_source of rows that name none

Written = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One kind of file."""

    schema: Callable[[], Any]  # a pyarrow.Schema; a function, so that pyarrow is loaded when a file is written
    rows: Callable[[int, Row], list[Written]]  # (index of the row, row) -> what is written for it


def verl_rows(index: int, row: Row) -> list[Written]:
    """One row in verl's format."""
    truth, rejected = row.chosen if row.chosen is not None else row.answer, row.rejected
    if row.label is False:  # a bad answer is nothing to aim at
        truth, rejected = None, row.answer
    extra_info = {
        "index": index,
        "prompt": row.prompt_messages,
        "chosen": row.chosen,
        "rejected": rejected,
        "label": row.label,
        "file": row.file,
        "line": row.line,
        "row": json.dumps(row.extra, default=str) if row.extra else None,
    }
    return [
        {
            "data_source": row.data_source or DEFAULT_SOURCE,
            "prompt": row.prompt_messages,
            "ability": "chat",
            "reward_model": {"style": "rule", "ground_truth": truth or ""},
            "extra_info": extra_info,
        }
    ]


def pair_rows(index: int, row: Row) -> list[Written]:
    """One preference pair."""
    pair = {"prompt": row.prompt_messages, "chosen": row.chosen, "rejected": row.rejected}
    return [pair | {"file": row.file, "line": row.line}]


def labelled_rows(index: int, row: Row) -> list[Written]:
    """A labelled answer; a pair becomes two."""
    answers = [(row.answer, row.label)] if row.label is not None else [(row.chosen, True), (row.rejected, False)]
    return [
        {"prompt": row.prompt_messages, "completion": text, "label": label, "file": row.file, "line": row.line}
        for text, label in answers
    ]


def _message_list() -> Any:
    import pyarrow as pa

    return pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


def verl_schema() -> Any:
    """Columns of verl's format."""
    import pyarrow as pa

    text, whole = pa.string(), pa.int64()
    extra = [("index", whole), ("prompt", _message_list()), ("chosen", text), ("rejected", text), ("label", pa.bool_())]
    extra += [("file", text), ("line", whole), ("row", text)]
    return pa.schema(
        [
            ("data_source", text),
            ("prompt", _message_list()),
            ("ability", text),
            ("reward_model", pa.struct([("style", text), ("ground_truth", text)])),
            ("extra_info", pa.struct(extra)),
        ]
    )


def pair_schema() -> Any:
    """Columns of preference pairs."""
    import pyarrow as pa

    text = pa.string()
    columns = [("prompt", _message_list()), ("chosen", text), ("rejected", text), ("file", text), ("line", pa.int64())]
    return pa.schema(columns)


def labelled_schema() -> Any:
    """Columns of labelled answers."""
    import pyarrow as pa

    text = pa.string()
    columns = [("prompt", _message_list()), ("completion", text), ("label", pa.bool_())]
    return pa.schema([*columns, ("file", text), ("line", pa.int64())])


LAYOUTS = {
    "rollouts": Layout(schema=verl_schema, rows=verl_rows),
    "pairs": Layout(schema=pair_schema, rows=pair_rows),
    "labelled": Layout(schema=labelled_schema, rows=labelled_rows),
}
