"""The data room: any common file with prompts and answers in, checked rows for verl out, every lost row named.

    table = read_rows(cfg.data)              # in memory, no tokenizer: for looking
    prepared = prepare(cfg, tokenizer)       # parquet in verl's row format: for training

Reading starts nothing heavy: pyarrow and datasets are loaded when a table is read or written.
"""

from quickstart.data.prepare import Prepared, prepare
from quickstart.data.reading import Table, read_rows
from quickstart.data.rows import Row

__all__ = ["Prepared", "Row", "Table", "prepare", "read_rows"]
