"""Parquet and arrow files to records, a thousand rows at a time.

pyarrow is loaded when the first table is read. Not here: what the columns mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quickstart.data import text
from quickstart.data.ledger import Ledger
from quickstart.data.rows import Record
from quickstart.data.sources import Source
from quickstart.errors import Fault

BATCH_ROWS = 1000
ARROW_MAGIC = b"ARROW1"


def read_parquet(source: Source, ledger: Ledger) -> Iterator[Record]:
    """The rows of a parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(_arrow_input(source.path)) as file:
            columns = _readable(file.schema_arrow, source.name, ledger)
            yield from _numbered(file.iter_batches(batch_size=BATCH_ROWS, columns=columns))
    except (pa.ArrowException, UnicodeDecodeError, OSError, *text.DAMAGED) as error:
        ledger.general.append(_damaged(source.name, "parquet", error))


def read_arrow(source: Source, ledger: Ledger) -> Iterator[Record]:
    """The rows of an arrow file, in the file format or (as the datasets library writes) the stream format."""
    import pyarrow as pa

    try:
        with _arrow_input(source.path) as raw:
            is_file = raw.read(len(ARROW_MAGIC)) == ARROW_MAGIC
            raw.seek(0)
            if is_file:
                file = pa.ipc.open_file(raw)
                batches = (file.get_batch(index) for index in range(file.num_record_batches))
            else:
                file = batches = pa.ipc.open_stream(raw)
            columns = _readable(file.schema, source.name, ledger)
            yield from _numbered(batch.select(columns) for batch in batches)
    except (pa.ArrowException, UnicodeDecodeError, OSError, *text.DAMAGED) as error:
        ledger.general.append(_damaged(source.name, "arrow", error))


def _arrow_input(path: Path) -> Any:
    """The file as pyarrow reads it: mapped, or unpacked in memory where it is gzip."""
    import pyarrow as pa

    with path.open("rb") as file:
        packed = file.read(2) == text.GZIP_MAGIC
    if not packed:
        return pa.memory_map(str(path))
    with text.open_bytes(path) as unpacked:
        return pa.BufferReader(unpacked.read())


def _numbered(batches: Any) -> Iterator[Record]:
    line = 0
    for batch in batches:
        batch.validate(full=True)  # offsets and text are not checked on reading; damaged ones crash the process
        for start in range(0, batch.num_rows, BATCH_ROWS):
            for value in batch.slice(start, BATCH_ROWS).to_pylist():
                line += 1
                yield Record(value=value, line=line)


def _readable(schema: Any, name: str, ledger: Ledger) -> list[str]:
    """The columns without binary data, which no text model can use."""
    binary = [field.name for field in schema if _holds_binary(field.type)]
    if binary:
        ledger.notes.append(f"{name}: columns with binary data are not read: {', '.join(binary)}")
    return [field.name for field in schema if field.name not in binary]


def _holds_binary(kind: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return True
    return any(_holds_binary(kind.field(index).type) for index in range(kind.num_fields))


def _damaged(name: str, kind: str, error: Exception) -> Fault:
    said = str(error).splitlines()[0]
    if isinstance(error, NotImplementedError):  # nested columns in row groups of more than 2 GB (datasets #7793)
        fix = "write it again with small row groups: pyarrow.parquet.write_table(table, path, row_group_size=1000)"
        return Fault(field=name, found=f"a {kind} file that pyarrow cannot read", rule=said, fix=fix)
    found = f"a file that cannot be read as {kind} ({said})"
    return Fault(field=name, found=found, rule="the file must be complete", fix="copy, download or write it again")
