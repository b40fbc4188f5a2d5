"""The data room: any common file with prompts and answers in, checked rows out, every lost row named.

    table = read_rows(cfg.data)                     # in memory, no tokenizer: for looking
    prepared = prepare(cfg, tokenizer)              # parquet in verl's row format
    pairs = prepare_pairs(cfg, tokenizer)           # for dpo; prepare_labelled for kto

Reading starts nothing heavy: pyarrow and datasets are loaded when a table is read or written.
"""

from quickstart.data.prepare import (
    Examples,
    Labelled,
    Pair,
    Prepared,
    cache_folder,
    look_at_rows,
    prepare,
    prepare_labelled,
    prepare_pairs,
)
from quickstart.data.reading import Table, read_rows
from quickstart.data.rows import Row

__all__ = [
    "Examples",
    "Labelled",
    "Pair",
    "Prepared",
    "Row",
    "Table",
    "cache_folder",
    "look_at_rows",
    "prepare",
    "prepare_labelled",
    "prepare_pairs",
    "read_rows",
]
