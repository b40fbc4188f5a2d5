"""Files to one parquet file: read, checked, measured and written as a stream, or taken from the cache.

Not here: what a purpose's rows look like (layouts.py), what a run makes of them (prepare.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from quickstart.arguments import DataArguments
from quickstart.data import cache
from quickstart.data.layouts import LAYOUTS, Written
from quickstart.data.lengths import LengthGate
from quickstart.data.reading import Reader
from quickstart.data.rows import Row
from quickstart.data.sources import Source

GROUP_ROWS = 1000  # rows of one parquet row group; large ones of nested columns cannot be read back (datasets #7793)

WrittenPurpose = Literal["rollouts", "pairs", "labelled"]


@dataclass(kw_only=True)
class Conversion:
    """One setting's files, on their way to one parquet file.

    Args:
        args: the data settings. setting: data.train_file or data.eval_file, for messages.
        files: its value.
        purpose: what the rows are for. needs_answer: see check_row.
        tokenizer: a transformers tokenizer with a chat template.
    """

    args: DataArguments
    setting: str
    files: str | list[str]
    purpose: WrittenPurpose
    needs_answer: bool
    tokenizer: Any
    _sources: Counter[str] = field(default_factory=Counter, init=False)  # data_source -> rows

    def run(self, folder: Path) -> tuple[cache.Entry, str]:
        """The converted rows, and the sha256 of the files. Raises UserError with every fault of these files.

        folder: the cache, writable.
        """
        reader = Reader(args=self.args, setting=self.setting, purpose=self.purpose, needs_answer=self.needs_answer)
        sources = reader.sources(self.files)
        digest = cache.content_digest(sources) if sources else ""
        key = self._key(sources, digest)
        entry = cache.find(folder, key)
        return entry or self._convert(reader, sources, folder, key), digest

    def _key(self, sources: list[Source], digest: str) -> str:
        names = ("columns", "field", "max_samples", "max_prompt_length", "max_response_length", "overlong")
        return cache.key_of(
            {
                "content": digest,
                "names": [source.name for source in sources],  # they stand in messages and rows
                "settings": {name: vars(self.args)[name] for name in (*names, "split", "config_name")},
                "purpose": [self.purpose, self.needs_answer],
                "tokenizer": cache.tokenizer_digest(self.tokenizer),
                "code": cache.code_digest(),
            }
        )

    def _convert(self, reader: Reader, sources: list[Source], folder: Path, key: str) -> cache.Entry:
        gate = LengthGate(
            tokenizer=self.tokenizer,
            max_prompt=self.args.max_prompt_length,
            max_answer=None if self.purpose == "rollouts" else self.args.max_response_length,
            overlong=self.args.overlong,
        )
        with cache.NewEntry(folder, key) as new:
            rows = gate.pass_through(reader.rows(sources), reader.ledger)
            kept, written = write_parquet(new.rows_path, self._counted(rows), self.purpose)
            names = ", ".join(source.name for source in sources)
            if not reader.ledger.has_faults:
                reader.ledger.general.extend(gate.faults(names))
            reader.finish(kept, sources)
            account = cache.Account(
                rows_read=reader.ledger.rows_read,
                rows_kept=kept,
                rows_written=written,
                rows_bytes=new.rows_path.stat().st_size,
                shape=", ".join(reader.shape_names),
                notices=reader.ledger.notices(),
                data_sources=dict(self._sources),
                longest_prompt=gate.prompt.longest,
            )
            return new.publish(account)

    def _counted(self, rows: Iterable[Row]) -> Iterator[Row]:
        for row in rows:
            self._sources[row.data_source or ""] += 1
            yield row


def write_parquet(path: Path, rows: Iterable[Row], purpose: WrittenPurpose) -> tuple[int, int]:
    """Write rows a group at a time. Returns (rows taken, rows written)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    layout, schema = LAYOUTS[purpose], LAYOUTS[purpose].schema()
    kept = written = 0
    rows = iter(rows)
    with pq.ParquetWriter(path, schema) as writer:
        while group := list(islice(rows, GROUP_ROWS)):
            cells: list[Written] = [cell for index, row in enumerate(group, kept) for cell in layout.rows(index, row)]
            writer.write_table(pa.Table.from_pylist(cells, schema=schema))
            kept, written = kept + len(group), written + len(cells)
    return kept, written
