"""JSON files to records: one object a line, an array, or an object that wraps the array in one of its fields.

Arrays are taken apart element by element, so that only the text and one row are held. Not here: what a record means.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from quickstart.data import text as textfile
from quickstart.data.ledger import Ledger
from quickstart.data.rows import Record, RowFault, shown
from quickstart.errors import Fault

SPACE = re.compile(r"[ \t\r\n]*")
DECODER = json.JSONDecoder()
# What the json module raises: syntax; numbers of more than 4,300 digits; nesting of more than about 1,000 levels.
BAD_JSON = (ValueError, RecursionError)

IsRow = Callable[[dict[str, Any]], bool]


def read_json(path: Path, name: str, wrapper: str | None, is_row: IsRow, ledger: Ledger) -> Iterator[Record]:
    """The records of a JSON or JSON Lines file; its content decides which it is, its name only in doubt.

    Args:
        path: the file. name: as the user wrote it.
        wrapper: data.field, the key of the list inside a wrapping object.
        is_row: whether an object is a row of a known shape, and so no wrapper.
    """
    if wrapper is None and _is_lines(path, is_row):
        return json_lines(path, name, ledger)
    return json_document(path, name, wrapper, is_row, ledger)


def _is_lines(path: Path, is_row: IsRow) -> bool:
    """Whether each line is a record of its own."""
    head = list(islice(textfile.lines(path, "", Ledger()), 2))
    if not head:
        return True  # empty or not UTF-8; the reader of lines says so
    first = head[0][1].strip()
    try:
        value = json.loads(first)
    except BAD_JSON:
        lines_by_name = path.name.lower().removesuffix(".gz").endswith((".jsonl", ".ndjson"))
        return lines_by_name and first != "{" and not first.startswith("[")
    if not isinstance(value, dict):
        return not isinstance(value, list)
    return len(head) == 2 or is_row(value) or not _list_fields(value)


def _list_fields(value: dict[str, Any]) -> list[str]:
    """Names of the fields that hold a list of objects."""
    return [key for key, item in value.items() if isinstance(item, list) and item and isinstance(item[0], dict)]


def json_lines(path: Path, name: str, ledger: Ledger) -> Iterator[Record]:
    """One record a line; a bad line is a fault, and the next is read."""
    for number, line in textfile.lines(path, name, ledger):
        try:
            value = json.loads(line)
        except BAD_JSON as error:
            ledger.lost(bad_json(line, error), name, number)
            continue
        yield Record(value=value, line=number)


def json_document(path: Path, name: str, wrapper: str | None, is_row: IsRow, ledger: Ledger) -> Iterator[Record]:
    """The records of one JSON value. After a syntax error nothing more can be read: one fault."""
    text = textfile.whole(path, name, ledger)
    if text is None:
        return
    try:
        yield from _document_rows(text, name, wrapper, is_row, ledger)
    except BAD_JSON as error:
        position = error.pos if isinstance(error, json.JSONDecodeError) else 0
        ledger.lost(bad_json(text, error), name, text.count("\n", 0, position) + 1)


def _document_rows(text: str, name: str, wrapper: str | None, is_row: IsRow, ledger: Ledger) -> Iterator[Record]:
    start = _skip(text, 0)
    if text[start : start + 1] == "[" and wrapper is None:
        yield from _numbered(text, start)
        return
    value, end = DECODER.raw_decode(text, start)
    rest = _skip(text, end)
    if rest < len(text):
        raise json.JSONDecodeError("a second value in the file", text, rest)
    if wrapper is None and (not isinstance(value, dict) or is_row(value) or not _list_fields(value)):
        yield Record(value=value, line=text.count("\n", 0, start) + 1)
        return
    position = _field_start(text, start, wrapper) if (wrapper := _pick(value, wrapper, name, ledger)) else None
    if position is not None:
        yield from _numbered(text, position)


def _pick(value: Any, wrapper: str | None, name: str, ledger: Ledger) -> str | None:
    """The field that holds the rows; None, with a fault in the ledger, where it is not clear."""
    fields = _list_fields(value) if isinstance(value, dict) else []
    if wrapper is None and len(fields) == 1:
        ledger.remark(f"rows taken from the field `{fields[0]}` of the object in {name}", name, 1)
        return fields[0]
    if wrapper in fields:
        return wrapper
    found = f"fields with a list of objects: {', '.join(fields)}" if fields else "no field with a list of objects"
    fix = f"set data.field={fields[0]}" if fields else "remove data.field; rows are one object a line or an array"
    rule = "data.field must name the list of rows" if wrapper else "it must be clear which field holds the rows"
    ledger.general.append(
        Fault(field=f"data.field ({name})", found=f"{wrapper or 'null'}, {found}", rule=rule, fix=fix)
    )
    return None


def _field_start(text: str, start: int, wrapper: str) -> int | None:
    """Where the value of one key of the object at `start` begins. The text is known to be valid."""
    position = _skip(text, start + 1)
    found = None
    while text[position] != "}":
        key, position = DECODER.raw_decode(text, position)
        position = _skip(text, _skip(text, position) + 1)  # over the colon
        if key == wrapper:
            found = position
        _, position = DECODER.raw_decode(text, position)
        position = _skip(text, position)
        if text[position] == ",":
            position = _skip(text, position + 1)
    return found


def _numbered(text: str, start: int) -> Iterator[Record]:
    """The elements of the array at `start`, with the line that each begins in."""
    line, seen = 1, 0
    for position, value in _elements(text, start):
        line, seen = line + text.count("\n", seen, position), position
        yield Record(value=value, line=line)


def _elements(text: str, start: int) -> Iterator[tuple[int, Any]]:
    """(position, value) of each element of the array at `start`."""
    position = _skip(text, start + 1)
    if text[position : position + 1] == "]":
        return
    while True:
        value, end = DECODER.raw_decode(text, position)
        yield position, value
        position = _skip(text, end)
        mark = text[position : position + 1]
        if mark == "]":
            return
        if mark != ",":
            raise json.JSONDecodeError("Expecting ',' delimiter", text, position)
        comma, position = position, _skip(text, position + 1)
        if text[position : position + 1] == "]":
            raise json.JSONDecodeError("a comma before the closing bracket", text, comma)


def _skip(text: str, position: int) -> int:
    match = SPACE.match(text, position)
    assert match is not None, "matches the empty string"
    return match.end()


def bad_json(text: str, error: Exception) -> RowFault:
    """The fault of a line or document that is not JSON."""
    if isinstance(error, RecursionError):
        return RowFault(found="brackets nested too deep", rule="not valid JSON", fix="repair or remove the line")
    if not isinstance(error, json.JSONDecodeError):
        return RowFault(found=str(error), rule="not valid JSON", fix="write the number as text")
    ends_early = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
    if ends_early:
        end = text.rstrip()[-40:]
        return RowFault(found=f"... {end}", rule="incomplete JSON: it ends early", fix="complete or remove the line")
    column = error.pos - text.rfind("\n", 0, error.pos)
    fix = "repair or remove the line"
    if "double quotes" in error.msg:
        fix = "JSON wants double quotes around names and texts"
    near = text[max(0, error.pos - 20) : error.pos + 20].strip()
    return RowFault(found=f"column {column}: {shown(near)}", rule=f"not valid JSON: {error.msg}", fix=fix)
