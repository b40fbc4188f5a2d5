"""A trained policy as a folder that from_pretrained loads. Used by every trainer; knows verl's engine, no algorithm."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch


def export_model(engine: Any, tokenizer: Any, folder: Path, *, write: bool = True) -> None:
    """Write all weights as trained (LoRA merged), config and tokenizer; a folder of that name is replaced at the end.

    Args:
        engine: verl's FSDP engine of the policy.
        folder: the new folder.
        write: false on all ranks but one: weights are gathered by all of them.
    """
    from transformers import AutoModelForCausalLM

    state = {name: value.detach().cpu() for name, value in engine.get_per_tensor_param()[0]}
    if not write:
        return
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(engine.model_config.hf_config, dtype=next(iter(state.values())).dtype)
    empty.save_pretrained(part, state_dict=state)
    if engine.model_config.generation_config is not None:
        engine.model_config.generation_config.save_pretrained(part)
    tokenizer.save_pretrained(part)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(part, folder)
