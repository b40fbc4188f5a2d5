"""Rows to the file that verl's RLHFDataset reads: checked, measured, written as parquet.

A row of the file (verl/utils/dataset/rl_dataset.py, trainer/ppo/reward.py):

    data_source   text; verl's scorers go by it
    prompt        [{role, content}, ...]
    ability       text
    reward_model  {style: "rule", ground_truth: text}         chosen, or the only answer
    extra_info    {index, chosen, rejected, label, file, line, row}     row: all other columns, as JSON text

The other columns travel as JSON text because a table column has one type and rows do not: parquet would turn 4 beside
4.5 into 4.0 and fill in keys that other rows have. The reward guard (rewards/guard.py) unpacks them again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

from quickstart.arguments import RunConfig
from quickstart.data.lengths import LengthGate, check_template
from quickstart.data.reading import Reader
from quickstart.data.rows import Row
from quickstart.data.sources import expand
from quickstart.errors import Fault, UserError

GROUP_ROWS = 1000  # rows of one parquet row group; large ones of nested columns cannot be read back (datasets #7793)
DEFAULT_SOURCE = "quickstart"  # data_source of rows that name none


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What training needs to know about its data."""

    train_path: Path  # parquet
    eval_path: Path | None
    num_train: int
    num_eval: int
    notices: list[str]
    shape: str  # how the training file was understood
    sha256: str  # of the written training rows, hexadecimal


def prepare(cfg: RunConfig, tokenizer: Any) -> Prepared:
    """Read, check, measure and write the rows of a PPO-family run.

    Args:
        cfg: the settings; `data`, `rl.reward` and `training.output_dir` are read.
        tokenizer: the policy's, with a chat template.

    Raises:
        UserError: all faults of the training and evaluation files at once.
    """
    check_template(tokenizer, cfg.model.model_name_or_path)
    folder = cache_folder(cfg)
    faults: list[Fault] = []
    written = {}
    for part, files in (("train", cfg.data.train_file), ("eval", cfg.data.eval_file)):
        if files is not None:
            try:
                written[part] = _write_part(cfg, tokenizer, folder, part, files)
            except UserError as error:  # gathered, so that one message has both files' faults
                faults.extend(error.faults)
    if faults:
        raise UserError(faults)
    train, evaluation = written["train"], written.get("eval")
    return Prepared(
        train_path=train[0],
        eval_path=evaluation[0] if evaluation else None,
        num_train=train[1],
        num_eval=evaluation[1] if evaluation else 0,
        notices=train[2] + (evaluation[2] if evaluation else []),
        shape=train[3],
        sha256=train[4],
    )


def cache_folder(cfg: RunConfig) -> Path:
    """Where converted data is kept: data.cache_dir, or beside the outputs."""
    if cfg.data.cache_dir is not None:
        return Path(cfg.data.cache_dir).expanduser()
    return Path(cfg.training.output_dir).absolute().parent / ".quickstart_cache"


def _write_part(
    cfg: RunConfig, tokenizer: Any, folder: Path, part: str, files: str | list[str]
) -> tuple[Path, int, list[str], str, str]:
    setting = f"data.{part}_file"
    sources = expand(files, setting)
    names = ", ".join(source.name for source in sources)
    reader = Reader(args=cfg.data, setting=setting, purpose="rollouts", needs_answer=cfg.rl.reward == "preference")
    gate = LengthGate(tokenizer=tokenizer, limit=cfg.data.max_prompt_length, overlong=cfg.data.overlong)
    ledger = reader.ledger
    rows = list(gate.pass_through(reader.rows(sources), ledger))
    ledger.rows_kept = len(rows)
    ledger.raise_faults()
    gate.raise_if_many(names)
    ledger.raise_empty(setting, names)
    digest = sha256("".join(json.dumps(verl_row(i, r)) for i, r in enumerate(rows)).encode()).hexdigest()
    path = folder / f"{part}_{digest[:16]}.parquet"
    folder.mkdir(parents=True, exist_ok=True)
    write_parquet(path, (verl_row(index, row) for index, row in enumerate(rows)))
    return path, len(rows), ledger.notices(), ", ".join(reader.shape_names), digest


def verl_row(index: int, row: Row) -> dict[str, Any]:
    """One row in verl's format; see the module."""
    truth = row.chosen if row.chosen is not None else row.answer
    rejected = row.rejected
    if row.label is False:  # a bad answer is nothing to aim at
        truth, rejected = None, row.answer
    return {
        "data_source": row.data_source or DEFAULT_SOURCE,
        "prompt": row.prompt_messages,
        "ability": "chat",
        "reward_model": {"style": "rule", "ground_truth": truth or ""},
        "extra_info": {
            "index": index,
            "chosen": row.chosen,
            "rejected": rejected,
            "label": row.label,
            "file": row.file,
            "line": row.line,
            "row": json.dumps(row.extra, ensure_ascii=False, default=str) if row.extra else None,
        },
    }


def write_parquet(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows to `path`, a group at a time, under another name until it is complete."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = _verl_schema(pa)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with pq.ParquetWriter(part, schema) as writer:
        for group in _groups(rows):
            writer.write_table(pa.Table.from_pylist(group, schema=schema))
    os.replace(part, path)


def _groups(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    rows = iter(rows)
    while group := list(islice(rows, GROUP_ROWS)):
        yield group


def _verl_schema(pa: Any) -> Any:
    text, whole = pa.string(), pa.int64()
    message = pa.struct([("role", text), ("content", text)])
    extra = [("index", whole), ("chosen", text), ("rejected", text), ("label", pa.bool_())]
    extra += [("file", text), ("line", whole), ("row", text)]
    return pa.schema(
        [
            ("data_source", text),
            ("prompt", pa.list_(message)),
            ("ability", text),
            ("reward_model", pa.struct([("style", text), ("ground_truth", text)])),
            ("extra_info", pa.struct(extra)),
        ]
    )
