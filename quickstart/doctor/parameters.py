"""How large a model is: parameters from the headers of its weight files, widths from config.json. Loads nothing.

Not here: what that costs in memory (memory.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quickstart.doctor.model import read_safetensors_header, weight_files

# Our name -> what model families call it in config.json, the usual one first.
NAMES: dict[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocabulary": ("vocab_size",),
    "positions": ("max_position_embeddings", "n_positions"),
}
OUTPUT_HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")
BYTES_OF = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1}


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A causal language model in numbers."""

    parameters: int  # of the policy, an output head that is the embedding counted once
    head_parameters: int  # of an output head of its own; 0 where it is the embedding
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    positions: int | None  # longest sequence that it can read; None: config.json does not say
    stored: str = "F32"  # dtype of most weights on disk, in safetensors' words
    counted: bool = True  # from headers; False: estimated from the size of .bin files

    @property
    def body_parameters(self) -> int:
        """Without an output head of its own: what a value model keeps of it."""
        return self.parameters - self.head_parameters

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding."""
        return self.head_parameters == 0


def widths(config: dict[str, Any]) -> dict[str, int | None]:
    """The numbers of config.json under our names; those of the text part where a model has several."""
    text = config.get("text_config")
    source = text if isinstance(text, dict) else config
    found: dict[str, int | None] = {}
    for name, theirs in NAMES.items():
        values = [source[key] for key in theirs if isinstance(source.get(key), int)]
        found[name] = values[0] if values else None
    return found


def tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]] | None:
    """Name -> (dtype, shape) of every stored tensor; None where the weights are .bin files, which have no header."""
    files = weight_files(folder)
    if not files or any(path.suffix != ".safetensors" for path in files):
        return None
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in files:
        header = read_safetensors_header(path) or {}
        entries = ((name, entry) for name, entry in header.items() if name != "__metadata__")
        found.update((name, (entry["dtype"], tuple(entry["shape"]))) for name, entry in entries)
    return found


def model_shape(folder: Path, config: dict[str, Any]) -> ModelShape | None:
    """The model's numbers; None where config.json lacks the widths that a plan needs."""
    found = widths(config)
    hidden, layers, heads, vocabulary = (found[name] for name in ("hidden", "layers", "heads", "vocabulary"))
    if hidden is None or layers is None or heads is None or vocabulary is None:
        return None
    stored = tensors(folder)
    parameters, head, dtype = count(stored, bool(config.get("tie_word_embeddings", False)))
    if stored is None:
        size = sum(path.stat().st_size for path in weight_files(folder))
        parameters = size // (4 if str(config.get("torch_dtype", config.get("dtype"))) == "float32" else 2)
    return ModelShape(
        parameters=parameters,
        head_parameters=head,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=found["kv_heads"] or heads,
        head_dim=found["head_dim"] or hidden // heads,
        intermediate=found["intermediate"] or 4 * hidden,
        vocabulary=vocabulary,
        positions=found["positions"],
        stored=dtype,
        counted=stored is not None,
    )


def count(stored: dict[str, tuple[str, tuple[int, ...]]] | None, tied: bool) -> tuple[int, int, str]:
    """(parameters, those of an own output head, most common dtype) of stored tensors."""
    if not stored:
        return 0, 0, "unknown"
    sizes = {name: math.prod(shape) for name, (_, shape) in stored.items()}
    head = sum(sizes[name] for name in OUTPUT_HEADS if name in sizes)
    by_dtype: dict[str, int] = {}
    for name, (dtype, _) in stored.items():
        by_dtype[dtype] = by_dtype.get(dtype, 0) + sizes[name]
    total = sum(sizes.values())
    dtype = max(by_dtype, key=lambda name: by_dtype[name])
    return (total - head, 0, dtype) if tied else (total, head, dtype)


def millions(number: int) -> str:
    """3.2 M, 494 M, 7.6 B parameters."""
    if number >= 10**9:
        return f"{number / 10**9:.1f} B"
    return f"{number / 10**6:.1f} M" if number < 10**8 else f"{number / 10**6:.0f} M"
