"""Files to checked rows, as a stream: records, shape, row, check. Everything that is wrong goes to the ledger.

    table = read_rows(DataArguments(train_file="data/sample_100.jsonl"))

Not here: tokens, and writing (convert.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any

from quickstart.arguments import DataArguments
from quickstart.data import csvfile, hub, jsonfile, shapes, tables
from quickstart.data.check import Purpose, check_row
from quickstart.data.ledger import Ledger
from quickstart.data.rows import Record, Row, RowDrop, RowFault, shown
from quickstart.data.sources import Source, Wanted, expand

PEEK = 100  # records of a file whose columns together decide its shape
MEDIA = ("image", "images", "video", "videos", "audio", "audios")


@dataclass(frozen=True, kw_only=True)
class Table:
    """All rows of a reading, in memory. For looking at data; training streams instead."""

    rows: list[Row]
    shape: str  # as recognised; several, comma between them, where files differ
    notices: list[str]  # what was left out and why, what was understood in another way than written
    rows_read: int  # equals the rows here and those that were dropped
    dropped: dict[str, int]  # reason -> rows left out; their places stand in the notices


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
    shape_names: dict[str, None] = field(default_factory=dict, init=False)  # in the order of meeting
    _seen: set[int] = field(default_factory=set, init=False)  # hashes of rows, to find copies

    def sources(self, files: str | list[str]) -> list[Source]:
        """The files behind a setting; what cannot be found is in the ledger."""
        names = [files] if isinstance(files, str) else list(files)
        return expand(Wanted(setting=self.setting, names=names, split=self.args.split), self.ledger)

    def rows(self, sources: list[Source]) -> Iterator[Row]:
        """Good rows in order; what is wrong is in the ledger when this ends."""
        rows = chain.from_iterable(map(self._file_rows, sources))
        return islice(rows, self.args.max_samples) if self.args.max_samples else rows

    def finish(self, rows_kept: int, sources: list[Source]) -> None:
        """Close the account. Raises UserError with every fault, or when no row is left."""
        self.ledger.rows_kept = rows_kept
        self.ledger.raise_faults()
        self.ledger.raise_empty(self.setting, ", ".join(source.name for source in sources))

    def _file_rows(self, source: Source) -> Iterator[Row]:
        faults_before = len(self.ledger.general)
        records = iter(self._records(source))
        head = list(islice(records, min(PEEK, self.args.max_samples or PEEK)))
        if not head and len(self.ledger.general) == faults_before:
            self.ledger.notes.append(f"{source.name} has no records")
        shape = self._shape(head, source)
        if shape is None and any(isinstance(record.value, dict) for record in head):
            return
        for record in chain(head, records):
            self.ledger.rows_read += 1
            row = self._row(record, shape, source)
            if row is not None:
                yield row

    def _records(self, source: Source) -> Iterator[Record]:
        match source.kind:
            case "json":
                return jsonfile.read_json(source.path, source.name, self.args.field, self._is_row, self.ledger)
            case "csv":
                return csvfile.read_csv(source.path, source.name, self.ledger)
            case "parquet":
                return tables.read_parquet(source, self.ledger)
            case "arrow":
                return tables.read_arrow(source, self.ledger)
            case "hub":
                return hub.records(source.name, self.args.config_name, self.args.split, self.setting, self.ledger)

    def _is_row(self, value: dict[str, Any]) -> bool:
        return shapes.recognise(shapes.rename(value, self.args.columns)) is not None

    def _shape(self, head: list[Record], source: Source) -> shapes.Shape | None:
        """What the first records are; a fault where no shape fits."""
        columns = list(dict.fromkeys(key for r in head if isinstance(r.value, dict) for key in r.value))
        if not columns:
            return None
        faults = shapes.mapping_faults(self.args.columns, columns, source.name)
        shape = shapes.recognise(shapes.rename(dict.fromkeys(columns), self.args.columns))
        if faults or shape is None:
            self.ledger.general.extend(faults or [shapes.unknown_shape(source.name, columns)])
            return None
        self.shape_names[shape.name] = None
        known = shape.columns | set(self.args.columns.values())
        others = [str(column) for column in columns if column not in known]
        if others:
            self.ledger.notes.append(f"{source.name}: columns that {shape.name} does not use: {', '.join(others)}")
        return shape

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
        self._note_copy(row)
        return row

    def _parse(self, record: Record, shape: shapes.Shape | None, source: Source) -> Row:
        if not isinstance(record.value, dict) or shape is None:
            rule = "a row must be an object with named columns"
            raise RowFault(found=shown(record.value), rule=rule, fix='write {"prompt": "..."}')
        rec = shapes.rename(record.value, self.args.columns)
        media = next((column for column in MEDIA if rec.get(column)), None)
        if media is not None:
            rule, fix = "the models here read text only", "use rows without pictures and sound"
            raise RowFault(found=f"a column {media}", rule=rule, fix=fix)
        remark = partial(self.ledger.remark, file=source.name, line=record.line)
        parsed = shape.parse(rec, remark)
        extra = {key: value for key, value in rec.items() if key not in shape.columns and value is not None}
        extra |= parsed.pop("extra", {})
        return Row(**parsed, extra=extra, file=source.name, line=record.line)

    def _note_copy(self, row: Row) -> None:
        """Copies are kept (they may be meant, as weights) and counted."""
        prompt = tuple(message["content"] for message in row.prompt_messages)
        key = hash((prompt, row.chosen, row.rejected, row.answer, row.label))
        if key in self._seen:
            self.ledger.remark("exact copies of earlier rows, kept", row.file, row.line)
        self._seen.add(key)


def read_rows(args: DataArguments) -> Table:
    """Read and check the training rows without a tokenizer.

    Raises:
        UserError: all faults of all files, first ten places of each kind; or no usable row.
    """
    reader = Reader(args=args)
    sources = reader.sources(args.train_file)
    rows = list(reader.rows(sources))
    reader.finish(len(rows), sources)
    ledger = reader.ledger
    return Table(
        rows=rows,
        shape=", ".join(reader.shape_names),
        notices=ledger.notices(),
        rows_read=ledger.rows_read,
        dropped={reason: places.count for reason, places in ledger.dropped.items()},
    )
