"""Bytes to text lines: gzip or plain, UTF-8 with or without a byte-order mark, LF or CRLF.

Not here: what the lines mean.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from quickstart.data import encoding
from quickstart.data.ledger import Ledger
from quickstart.data.rows import RowFault
from quickstart.errors import Fault

GZIP_MAGIC = b"\x1f\x8b"
DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile)


def open_bytes(path: Path) -> BinaryIO:
    """The file's bytes, unpacked where it is gzip; its first bytes decide, not its name."""
    with path.open("rb") as file:
        packed = file.read(2) == GZIP_MAGIC
    return cast(BinaryIO, gzip.open(path, "rb")) if packed else path.open("rb")


def damaged(name: str, error: Exception) -> Fault:
    """A gzip file that ends early or does not unpack."""
    found = f"a gzip file that does not unpack ({error})"
    return Fault(field=name, found=found, rule="the file must be complete", fix="copy or download it again")


def all_lines(path: Path, name: str, ledger: Ledger) -> Iterator[tuple[int, str]]:
    """(line number, text with its line end) of every line.

    A file in another encoding is one fault and is not read further; in a UTF-8 file each damaged line is a fault.
    """
    try:
        with open_bytes(path) as file:
            yield from _decoded(file, path, name, ledger)
    except DAMAGED as error:
        ledger.general.append(damaged(name, error))


def lines(path: Path, name: str, ledger: Ledger) -> Iterator[tuple[int, str]]:
    """The lines that are not blank."""
    return ((number, text) for number, text in all_lines(path, name, ledger) if not text.isspace())


def _decoded(file: BinaryIO, path: Path, name: str, ledger: Ledger) -> Iterator[tuple[int, str]]:
    saw_utf8 = False  # a character outside ASCII that decoded
    head = file.read(encoding.SAMPLE_BYTES)
    if encoding.wide_encoding(head):
        ledger.general.append(encoding.not_utf8(path, name, 1, head))
        return
    file.seek(0)
    for number, raw in enumerate(file, 1):
        if number == 1:
            raw = raw.removeprefix(encoding.UTF8_BOM)
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            if not saw_utf8 and not encoding.mostly_utf8(raw):
                sample = raw + file.read(encoding.SAMPLE_BYTES)
                ledger.general.append(encoding.not_utf8(path, name, number, sample))
                return
            ledger.lost(_bad_byte(raw, error), name, number)
            continue
        saw_utf8 = saw_utf8 or not text.isascii()
        if text:  # a mark alone leaves nothing
            yield number, text


def whole(path: Path, name: str, ledger: Ledger) -> str | None:
    """The whole file as text; None, with a fault in the ledger, where it is not UTF-8."""
    try:
        with open_bytes(path) as file:
            raw = file.read()
    except DAMAGED as error:
        ledger.general.append(damaged(name, error))
        return None
    start = 0
    if not encoding.wide_encoding(raw[: encoding.SAMPLE_BYTES]):
        try:
            return raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            start = raw.rfind(b"\n", 0, error.start) + 1
    line = raw.count(b"\n", 0, start) + 1
    ledger.general.append(encoding.not_utf8(path, name, line, raw[start : start + encoding.SAMPLE_BYTES]))
    return None


def _bad_byte(raw: bytes, error: UnicodeDecodeError) -> RowFault:
    return RowFault(
        found=f"byte 0x{raw[error.start]:02x} in column {error.start + 1}",
        rule="the line is not valid UTF-8, while the file is",
        fix="repair or remove the line",
    )
