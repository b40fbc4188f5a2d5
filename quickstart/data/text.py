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
from quickstart.errors import Fault, UserError

GZIP_MAGIC = b"\x1f\x8b"
DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile)


def open_bytes(path: Path) -> BinaryIO:
    """The file's bytes, unpacked where it is gzip; its first bytes decide, not its name."""
    with path.open("rb") as file:
        packed = file.read(2) == GZIP_MAGIC
    return cast(BinaryIO, gzip.open(path, "rb")) if packed else path.open("rb")


def damaged(name: str, error: Exception) -> UserError:
    """A gzip file that ends early or does not unpack."""
    return UserError(
        Fault(
            field=name,
            found=f"a gzip file that does not unpack ({error})",
            rule="the file must be complete",
            fix="copy or download it again",
        )
    )


def lines(path: Path, name: str, ledger: Ledger) -> Iterator[tuple[int, str]]:
    """(line number, text) of every line that is not blank, without its line end.

    A file in another encoding is one fault and is not read further; in a UTF-8 file each damaged line is a fault.
    """
    saw_utf8 = False  # a character outside ASCII that decoded
    with open_bytes(path) as file:
        head = file.read(encoding.SAMPLE_BYTES)
        if encoding.wide_encoding(head):
            ledger.general.append(encoding.not_utf8(path, name, 1, head))
            return
        file.seek(0)
        for number, raw in enumerate(file, 1):
            raw = raw.removeprefix(encoding.UTF8_BOM) if number == 1 else raw
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                if not saw_utf8 and not encoding.mostly_utf8(raw):
                    sample = raw + file.read(encoding.SAMPLE_BYTES)
                    ledger.general.append(encoding.not_utf8(path, name, number, sample))
                    return
                ledger.rows_read += 1
                ledger.fault(_bad_byte(raw, error), name, number)
                continue
            saw_utf8 = saw_utf8 or not text.isascii()
            if text.strip():
                yield number, text


def whole(path: Path, name: str, ledger: Ledger) -> str | None:
    """The whole file as text; None, with a fault in the ledger, where it is not UTF-8."""
    with open_bytes(path) as file:
        raw = file.read()
    wide = encoding.wide_encoding(raw[: encoding.SAMPLE_BYTES])
    try:
        if not wide:
            return raw.decode("utf-8-sig")
        start = 0
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
