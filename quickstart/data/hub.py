"""Data sets on the Hugging Face hub: one split to records, or one message with the ways out.

The download and its cache are the datasets library's. Not here: local files.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quickstart.data.ledger import Ledger
from quickstart.data.rows import Record
from quickstart.errors import Fault, UserError

DEFAULT_HUB = "https://huggingface.co"
TIMEOUT_SECONDS = 3.0
BATCH_ROWS = 1000


def reachable(address: str, timeout: float = TIMEOUT_SECONDS) -> bool:
    """Whether a connection to the hub or its mirror can be opened."""
    parts = urlsplit(address)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 443), timeout=timeout):
            return True
    except OSError:
        return False


def load(name: str, config_name: str | None, split: str | None, setting: str) -> Any:
    """One split as a datasets.Dataset, from the library's cache or the hub.

    Args:
        name: owner/name. config_name, split: of the settings; split None is train.
        setting: the one that named it, for messages.

    Raises:
        UserError: unknown, unreachable or gated; no such split or configuration.
    """
    if not _online():
        if not is_cached(name):
            raise UserError(_unreachable(name, setting))
        _work_offline()
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    errors = (ValueError, OSError, HfHubHTTPError, datasets.exceptions.DatasetsError)
    try:
        return datasets.load_dataset(name, config_name, split=split or "train")
    except errors as error:
        raise UserError(_refused(name, setting, error)) from error


def records(name: str, config_name: str | None, split: str | None, setting: str, ledger: Ledger) -> Iterator[Record]:
    """The rows of one split; a data set that cannot be had is a fault in the ledger."""
    try:
        table = load(name, config_name, split, setting)
    except UserError as error:  # gathered with the faults of the other files
        ledger.general.extend(error.faults)
        return
    line = 0
    for batch in table.iter(batch_size=BATCH_ROWS):
        for values in zip(*batch.values(), strict=True):
            line += 1
            yield Record(value=dict(zip(batch, values, strict=True)), line=line)


def _address() -> str:
    return os.environ.get("HF_ENDPOINT", DEFAULT_HUB).rstrip("/")


def _online() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "0") in ("", "0") and reachable(_address())


def is_cached(name: str) -> bool:
    """Whether the datasets library has prepared this data set before (its folder name: owner___name)."""
    root = os.environ.get("HF_HOME", "~/.cache/huggingface")
    cache = Path(os.environ.get("HF_DATASETS_CACHE", f"{root}/datasets")).expanduser()
    folder = name.replace("/", "___")
    return (cache / folder).is_dir() or (cache / folder.lower()).is_dir()


def _work_offline() -> None:
    """Take the cached copy at once; the libraries would ask an unreachable hub for minutes."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # for what is imported later
    import datasets
    import huggingface_hub.constants

    datasets.config.HF_HUB_OFFLINE = True
    huggingface_hub.constants.HF_HUB_OFFLINE = True


def _unreachable(name: str, setting: str) -> Fault:
    return Fault(
        field=setting,
        found=f"{name} (no such file here, not in the local cache)",
        rule=f"{_address()} cannot be reached, so it cannot be downloaded",
        fix="one of three: a mirror (export HF_ENDPOINT=https://...), a local copy (write its path), "
        "or the bundled rows (data/sample_100.jsonl)",
    )


def _refused(name: str, setting: str, error: Exception) -> Fault:
    """The library's own sentence, which lists the splits or configurations that exist."""
    said = " ".join(str(error).strip().splitlines()[:2])
    fix = "check the spelling and, for a gated data set, your token (`hf auth login`)"
    if said.startswith(("Unknown split", "Bad split")):
        setting, fix = "data.split", "set data.split to one of these"
    elif said.startswith(("Config name", "BuilderConfig")):
        setting, fix = "data.config_name", "set data.config_name to one of these"
    return Fault(field=setting, found=name, rule=f"the data set cannot be loaded: {said}", fix=fix)
