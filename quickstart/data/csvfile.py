"""CSV and TSV files to records. The separator is read from the header line; a broken quote is a fault, not a long cell.

Not here: types. Every cell is text, and what needs another type is parsed strictly where it is used.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quickstart.data import text as textfile
from quickstart.data.ledger import Ledger
from quickstart.data.rows import Record, RowFault, shown
from quickstart.errors import Fault

csv.field_size_limit(2**31 - 1)  # the module's own limit, 128 KiB, is shorter than some answers
SEPARATORS = ",;\t"
# Columns whose cells may hold JSON: conversations, and the objects of verl's rows.
MESSAGE_COLUMNS = frozenset(("prompt", "chosen", "rejected", "completion", "messages", "conversations"))
OBJECT_COLUMNS = frozenset(("reward_model", "extra_info"))


def read_csv(path: Path, name: str, ledger: Ledger) -> Iterator[Record]:
    """The rows under the header line."""
    first = next(textfile.lines(path, name, Ledger()), (0, ""))[1]
    separator = max(SEPARATORS, key=first.count)
    lines = (line for _, line in textfile.all_lines(path, name, ledger))
    # strict: an unclosed quote is an error; without it the rest of the file would become one cell
    reader = csv.reader(lines, delimiter=separator, strict=True)
    header = next(_rows(reader, name, ledger), None)
    if header is None:
        return
    columns = header[1]
    twice = sorted({column for column in columns if columns.count(column) > 1 and column})
    if twice:
        fix = "give each column a name of its own"
        ledger.general.append(Fault(field=name, found=f"column {twice[0]} twice", rule="names must differ", fix=fix))
        return
    for line, cells in _rows(reader, name, ledger):
        if len(cells) != len(columns):
            ledger.lost(_wrong_width(cells, columns, separator), name, line)
            continue
        try:
            value = {column: _cell(column, cell) for column, cell in zip(columns, cells, strict=True) if column}
        except RowFault as fault:
            ledger.lost(fault, name, line)
            continue
        yield Record(value=value, line=line)


def _rows(reader: Any, name: str, ledger: Ledger) -> Iterator[tuple[int, list[str]]]:
    """(first line, cells) of each row; a row that breaks the format is a fault, and the next line begins anew."""
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            rule = f"not valid CSV: {error}"
            fix = "close the quote, and double each quote inside a quoted cell"
            ledger.lost(RowFault(found=f"the row that begins in line {line}", rule=rule, fix=fix), name, line)
            continue
        if cells is None:
            return
        if cells:
            yield line, cells


def _wrong_width(cells: list[str], columns: list[str], separator: str) -> RowFault:
    names = {",": "commas", ";": "semicolons", "\t": "tabs"}
    return RowFault(
        found=f"{len(cells)} cells, the first {shown(cells[0])}",
        rule=f"each row must have as many cells as the header ({len(columns)})",
        fix=f"put cells that hold {names[separator]}, quotes or line ends into double quotes",
    )


def _cell(column: str, cell: str) -> Any:
    """The text, or what its JSON says where the column holds conversations or objects."""
    begin = cell.lstrip()[:2]
    is_messages = column in MESSAGE_COLUMNS and begin == "[{"
    if not is_messages and not (column in OBJECT_COLUMNS and begin[:1] == "{"):
        return cell
    try:
        return json.loads(cell)
    except ValueError:
        rule = f"a conversation or object in a cell must be JSON ({column})"
        fix = "write it with json.dumps; str() of Python and pandas gives single quotes"
        raise RowFault(found=shown(cell), rule=rule, fix=fix) from None
