"""Log-probs of the starting weights: computed once, kept on disk, so that no second model is ever needed.

The file's name is a hash of all that decides the numbers: weights, token ids (so also data, template and lengths),
precision and device. Another model or one changed row is another file. Not here: how a log-prob is computed.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch

from quickstart.trainers.preference_batches import TokenRow
from quickstart.writing import write_atomic

WEIGHT_FILES = ("*.safetensors", "*.bin", "config.json")
BLOCK = 1 << 20


def weights_digest(folder: Path) -> str:
    """Hash of a model folder's weights and configuration."""
    digest = sha256()
    for path in sorted(path for pattern in WEIGHT_FILES for path in folder.glob(pattern)):
        digest.update(path.name.encode())
        with open(path, "rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
    return digest.hexdigest()


def rows_digest(rows: Sequence[TokenRow]) -> str:
    """Hash of token ids, row by row."""
    digest = sha256()
    for row in rows:
        ids = np.array([len(row.prompt), len(row.answer), *row.prompt, *row.answer], dtype=np.int64)
        digest.update(ids.tobytes())
    return digest.hexdigest()


def reference_log_probs(
    rows: Sequence[TokenRow],
    compute: Callable[[Sequence[TokenRow]], torch.Tensor],
    *,
    cache: Path,
    model: Path,
    facts: dict[str, str],
    write: bool = True,
) -> tuple[torch.Tensor, Path, bool]:
    """Summed log-probs of the answers, from the cache where they are.

    Args:
        compute: rows -> (rows,), under the starting weights.
        cache: folder of the files.
        model: folder of the starting weights.
        facts: what else decides the numbers.
        write: false on all ranks but one.

    Returns:
        (rows,) float64; the file; and whether it was there.
    """
    key = json.dumps({"weights": weights_digest(model), "rows": rows_digest(rows), **facts}, sort_keys=True)
    path = cache / f"reference_{sha256(key.encode()).hexdigest()[:24]}.npy"
    if path.is_file():
        return torch.from_numpy(np.load(path, allow_pickle=False)), path, True
    found = compute(rows)
    if write:
        cache.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        np.save(buffer, found.numpy(), allow_pickle=False)
        write_atomic(path, buffer.getvalue())
    return found, path, False
