"""Which files `data.train_file` names. Not here: what is in them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quickstart.errors import Fault, UserError


@dataclass(frozen=True, kw_only=True)
class Source:
    """One file to read."""

    path: Path
    name: str  # as the user wrote it, for messages


def expand(written: str | list[str], field: str) -> list[Source]:
    """The files behind a setting, in order. field: the setting, for messages. Raises UserError."""
    names = [written] if isinstance(written, str) else list(written)
    sources = [Source(path=Path(name).expanduser(), name=name) for name in names]
    missing = [source for source in sources if not source.path.is_file()]
    if missing:
        raise UserError(
            Fault(field=field, found=source.name, rule="no such file", fix="write the path of an existing file")
            for source in missing
        )
    return sources
