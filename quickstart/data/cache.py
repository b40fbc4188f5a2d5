"""Converted data, kept by content: the same files, settings and tokenizer are converted once.

An entry is a folder `<key>/` with the rows and an account of how they came about. Not here: the conversion.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from quickstart.data.sources import Source
from quickstart.errors import Fault, UserError

ROWS_FILE = "rows.parquet"
ACCOUNT_FILE = "account.json"
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Account:
    """How an entry came about."""

    rows_read: int
    rows_kept: int  # equals rows_read less those left out
    rows_written: int  # more than kept for kto, where a pair makes two
    rows_bytes: int  # size of the rows file, to notice one that was cut off
    shape: str
    notices: list[str]
    data_sources: dict[str, int]  # data_source -> rows
    longest_prompt: int  # in tokens


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Converted rows on disk."""

    rows_path: Path
    account: Account


def writable_folder(folder: Path, setting: str) -> Path:
    """The folder, made where it is missing and tried by writing a file. Raises UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"probe")
    except OSError as error:
        found = f"{folder} ({error.strerror})"
        rule, fix = "converted data is kept there, so it must be writable", "set data.cache_dir to a folder of yours"
        raise UserError(Fault(field=setting, found=found, rule=rule, fix=fix)) from None
    return folder


def file_digest(path: Path) -> str:
    """sha256 of a file's bytes, hexadecimal."""
    digest = sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def content_digest(sources: Iterable[Source]) -> str:
    """sha256 of the data as it lies on disk: a file's own, or that of the list of sums where there are several.

    A hub data set stands with its name, since what it holds is known only after the download.
    """
    sums = [sha256(s.name.encode()).hexdigest() if s.kind == "hub" else file_digest(s.path) for s in sources]
    return sums[0] if len(sums) == 1 else sha256("\n".join(sums).encode()).hexdigest()


@cache
def code_digest() -> str:
    """sha256 of this package's own text: another version converts anew."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def tokenizer_digest(tokenizer: Any) -> str:
    """sha256 of what decides the length of a prompt: vocabulary, merges, template."""
    state = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else json.dumps(tokenizer.get_vocab())
    return sha256(f"{state}\0{tokenizer.chat_template}".encode()).hexdigest()


def key_of(parts: dict[str, Any]) -> str:
    """The name of an entry, from everything that decides what is in it."""
    return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def find(folder: Path, key: str) -> Entry | None:
    """The entry of that key; None where there is none, or a damaged one."""
    rows, account = folder / key / ROWS_FILE, folder / key / ACCOUNT_FILE
    if not (rows.is_file() and account.is_file()):
        return None
    entry = Entry(rows_path=rows, account=Account(**json.loads(account.read_text(encoding="utf-8"))))
    return entry if rows.stat().st_size == entry.account.rows_bytes else None


class NewEntry:
    """An entry in the making: nothing is seen under its key before `publish`, and nothing stays without it."""

    def __init__(self, folder: Path, key: str) -> None:
        self._final = folder / key
        self._part = Path(tempfile.mkdtemp(dir=folder, prefix=f"{key}.part-"))
        self.rows_path = self._part / ROWS_FILE

    def __enter__(self) -> NewEntry:
        return self

    def publish(self, account: Account) -> Entry:
        """Write the account and give the entry its name. One that another run finished meanwhile gives way."""
        text = json.dumps(asdict(account), ensure_ascii=False, indent=1)
        (self._part / ACCOUNT_FILE).write_text(text, encoding="utf-8")
        shutil.rmtree(self._final, ignore_errors=True)
        os.replace(self._part, self._final)
        return Entry(rows_path=self._final / ROWS_FILE, account=account)

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._part, ignore_errors=True)
