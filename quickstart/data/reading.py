"""Files to checked rows, as a stream: records, shape, row, check. Everything that is wrong goes to the ledger.

    table = read_rows(DataArguments(train_file="data/sample_100.jsonl"))

Not here: tokens, and writing (prepare.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any

from quickstart.arguments import DataArguments
from quickstart.data import jsonfile, shapes
from quickstart.data.check import Purpose, check_row
from quickstart.data.ledger import Ledger
from quickstart.data.rows import Record, Row, RowDrop, RowFault, shown
from quickstart.data.sources import Source, expand

PEEK = 100  # records of a file whose columns together decide its shape


@dataclass(frozen=True, kw_only=True)
class Table:
    """All rows of a reading, in memory. For looking at data; training streams instead."""

    rows: list[Row]
    shape: str  # as recognised; several, comma between them, where files differ
    notices: list[str]  # what was left out and why, what was understood in another way than written
    rows_read: int


@dataclass(kw_only=True)
class Reader:
    """Streams the rows of some files.

    Args:
        args: the data settings.
        setting: the one that names the files, for messages.
        purpose, needs_answer: see check_row.
    """

    args: DataArguments
    setting: str = "data.train_file"
    purpose: Purpose = "read"
    needs_answer: bool = False
    ledger: Ledger = field(default_factory=Ledger)
    shape_names: dict[str, None] = field(default_factory=dict, init=False)  # names in the order of meeting

    def rows(self, sources: list[Source]) -> Iterator[Row]:
        """Good rows in order; what is wrong is in the ledger when this ends."""
        rows = chain.from_iterable(self._file_rows(source) for source in sources)
        return islice(rows, self.args.max_samples) if self.args.max_samples else rows

    def _file_rows(self, source: Source) -> Iterator[Row]:
        records = iter(self._records(source))
        head = list(islice(records, PEEK))
        columns = dict.fromkeys(key for r in head if isinstance(r.value, dict) for key in r.value)
        faults = shapes.mapping_faults(self.args.columns, columns, source.name)
        renamed = shapes.rename(dict.fromkeys(columns), {o: t for o, t in self.args.columns.items() if t in columns})
        shape = shapes.recognise(renamed)
        if columns and (faults or shape is None):
            self.ledger.general.extend(faults or [shapes.unknown_shape(source.name, columns)])
            return
        if shape is not None:
            self.shape_names[shape.name] = None
        for record in chain(head, records):
            row = self._row(record, shape, source)
            if row is not None:
                yield row

    def _records(self, source: Source) -> Iterator[Record]:
        return jsonfile.read_json(source.path, source.name, self.args.field, self._is_row, self.ledger)

    def _is_row(self, value: dict[str, Any]) -> bool:
        return shapes.recognise(shapes.rename(value, self.args.columns)) is not None

    def _row(self, record: Record, shape: shapes.Shape | None, source: Source) -> Row | None:
        """The checked row, or None with an entry in the ledger."""
        try:
            row = self._parse(record, shape, source)
            check_row(row, self.purpose, self.needs_answer)
        except RowFault as fault:
            self.ledger.fault(fault, source.name, record.line)
            return None
        except RowDrop as drop:
            self.ledger.drop(drop.reason, source.name, record.line)
            return None
        return row

    def _parse(self, record: Record, shape: shapes.Shape | None, source: Source) -> Row:
        if not isinstance(record.value, dict) or shape is None:
            rule = "a row must be an object with named columns"
            raise RowFault(found=shown(record.value), rule=rule, fix='write {"prompt": "..."}')
        rec = shapes.rename(record.value, self.args.columns)
        remark = partial(self.ledger.remark, file=source.name, line=record.line)
        parsed = shape.parse(rec, remark)
        extra = {key: value for key, value in rec.items() if key not in shape.columns and value is not None}
        extra |= parsed.pop("extra", {})
        return Row(**parsed, extra=extra, file=source.name, line=record.line)


def read_rows(args: DataArguments) -> Table:
    """Read and check the training rows without a tokenizer.

    Raises:
        UserError: all faults of all files, first ten places of each kind; or no usable row.
    """
    reader = Reader(args=args)
    sources = expand(args.train_file, reader.setting)
    rows = list(reader.rows(sources))
    ledger = reader.ledger
    ledger.rows_kept = len(rows)
    ledger.raise_faults()
    ledger.raise_empty(reader.setting, ", ".join(source.name for source in sources))
    return Table(rows=rows, shape=", ".join(reader.shape_names), notices=ledger.notices(), rows_read=ledger.rows_read)
