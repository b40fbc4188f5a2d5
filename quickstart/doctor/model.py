"""Is this folder a model that transformers will load? Answered from file names, sizes and headers, without torch.

Covers what fails badly or late in verl and transformers: a missing shard (FileNotFoundError inside a worker), a cut
file ("incomplete metadata"), a Git LFS pointer ("header too large"), gguf only, no tokenizer, no chat template.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quickstart.errors import Fault

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
LFS_HEAD = b"version https://git-lfs"
MAX_HEADER = 100_000_000  # bytes; safetensors' own limit


def check_model_folder(folder: Path, field: str) -> list[Fault]:
    """All faults of a local model folder, most basic first; an empty list means that it can be loaded.

    Args:
        folder: an existing folder.
        field: the setting that named it, for the messages.
    """
    config, faults = read_config(folder, field)
    if config is None:
        return faults
    faults = [*faults, *_weight_faults(folder, field), *_tokenizer_faults(folder, field)]
    return faults or list(_shape_faults(folder, config, field))


def read_config(folder: Path, field: str) -> tuple[dict[str, Any] | None, list[Fault]]:
    """config.json as a dictionary, or the fault that keeps it from being one."""
    path = folder / "config.json"
    if not path.is_file():
        here = ", ".join(sorted(p.name for p in folder.iterdir())[:5]) or "nothing"
        rule = "a model folder holds config.json, weights and a tokenizer"
        fix = "name the folder that holds config.json (a checkpoint's is checkpoints/global_step_N/model)"
        return None, [Fault(field=field, found=f"{folder} (in it: {here})", rule=rule, fix=fix)]
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        fix = "download the file again"
        return None, [Fault(field=field, found=f"{path}: {error}", rule="config.json must be JSON", fix=fix)]
    return config, []


def weight_files(folder: Path) -> list[Path]:
    """The weight files that transformers would read: those of the index, or the single file."""
    for name in INDEXES:
        if (folder / name).is_file():
            index = json.loads((folder / name).read_text(encoding="utf-8"))
            return [folder / shard for shard in sorted(set(index["weight_map"].values()))]
    return [folder / name for name in SINGLE_FILES if (folder / name).is_file()][:1]


def _weight_faults(folder: Path, field: str) -> Iterator[Fault]:
    files = weight_files(folder)
    if not files:
        gguf = sorted(folder.glob("*.gguf"))
        found = f"only {gguf[0].name}" if gguf else "no weight file"
        fix = (
            "use the original checkpoint: gguf files are for inference"
            if gguf
            else "put model.safetensors there, or download the model again"
        )
        yield Fault(field=field, found=f"{folder}: {found}", rule="weights must be .safetensors or .bin", fix=fix)
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        yield Fault(
            field=field,
            found=f"{folder}: {len(missing)} of {len(files)} weight files missing, first {missing[0]}",
            rule="every file that the index names must be there",
            fix="download the model again; a part was left out",
        )
    for path in files:
        if path.is_file():
            yield from _file_faults(path, field)


def _file_faults(path: Path, field: str) -> Iterator[Fault]:
    with path.open("rb") as file:
        head = file.read(len(LFS_HEAD))
    if head == LFS_HEAD:
        rule, fix = "the file is a Git LFS pointer, not weights", "run `git lfs pull` in that folder"
        yield Fault(field=field, found=str(path), rule=rule, fix=fix)
    elif path.suffix == ".safetensors":
        wanted = safetensors_size(path)
        if wanted is None or wanted != path.stat().st_size:
            size = path.stat().st_size
            yield Fault(
                field=field,
                found=f"{path}, {size} bytes" + ("" if wanted is None else f" where its header says {wanted}"),
                rule="the weight file is cut off or damaged",
                fix="download the file again",
            )


def read_safetensors_header(path: Path) -> dict[str, Any] | None:
    """The header of a safetensors file: tensor name -> dtype, shape, data_offsets; None where it is damaged.

    Format: 8 bytes little-endian header length, then JSON (huggingface/safetensors README).
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            return None
        (length,) = struct.unpack("<Q", start)
        if length > min(MAX_HEADER, size - 8):
            return None
        try:
            header = json.loads(file.read(length))
        except ValueError:
            return None
    return header if isinstance(header, dict) else None


def safetensors_size(path: Path) -> int | None:
    """The size in bytes that the header promises; None where the header itself is damaged."""
    header = read_safetensors_header(path)
    if header is None:
        return None
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return 8 + length + max(ends, default=0)


EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
OTHER_WIDTHS = ("word_embed_proj_dim", "embedding_size")  # of models whose embedding is not as wide as their layers


def _shape_faults(folder: Path, config: dict[str, Any], field: str) -> Iterator[Fault]:
    """Weights and config.json of two models: transformers stops at that only after everything has been loaded."""
    wanted = (config.get("vocab_size"), config.get("hidden_size", config.get("n_embd")))
    if None in wanted or any(name in config for name in OTHER_WIDTHS):
        return
    for path in weight_files(folder):
        header = (read_safetensors_header(path) if path.suffix == ".safetensors" else None) or {}
        for name, entry in header.items():
            if name.endswith(EMBEDDINGS) and tuple(entry["shape"]) != wanted:
                sizes = " x ".join(map(str, entry["shape"])), " x ".join(map(str, wanted))
                found = f"{folder}: an embedding of {sizes[0]} in {path.name}, and of {sizes[1]} by config.json"
                rule, fix = "config.json must be that of the weights", "copy both from the same model"
                yield Fault(field=field, found=found, rule=rule, fix=fix)


def _tokenizer_faults(folder: Path, field: str) -> Iterator[Fault]:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        yield Fault(
            field=field,
            found=f"{folder}: no tokenizer file",
            rule=f"a model folder holds its tokenizer ({', '.join(TOKENIZER_FILES[:3])} ...)",
            fix="copy the tokenizer files there, or set model.tokenizer_name_or_path",
        )
