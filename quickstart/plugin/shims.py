"""The verl functions that need a replacement, one class of fault each. Applied by :func:`install`, removed by its undo.

verl's own doors (registries, config keys) are used wherever there is one; what is left here cannot be reached through
a door in 0.9.1. Each shim names the file and line that makes it needed; tests/test_plugin_shims.py holds each one to
verl's text, and :func:`require_supported_verl` refuses any other version before a shim is applied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from quickstart.errors import Fault, UserError
from quickstart.plugin import SUPPORTED_VERL

HF_ROLLOUT = ("hf", "async")
HF_ROLLOUT_CLASS = "quickstart.plugin.rollout.LocalRollout"


@dataclass(frozen=True, kw_only=True)
class Shim:
    """One replaced name: `module.name`, what it becomes, and why."""

    module: Any
    name: str
    replacement: Any
    why: str
    where: str  # verl file and line of 0.9.1


def require_supported_verl() -> None:
    """Raise UserError unless the installed verl is the one that the shims were written for."""
    found = metadata.version("verl")
    if found != SUPPORTED_VERL:
        raise UserError(
            Fault(
                field="package verl",
                found=found,
                rule=f"this version of quickstart drives verl {SUPPORTED_VERL} and no other",
                fix=f"pip install verl=={SUPPORTED_VERL}",
            )
        )


def load_value_head_model(
    local_path: str, torch_dtype: torch.dtype, model_config: Any, trust_remote_code: bool
) -> torch.nn.Module:
    """The critic: the policy's body with a head of one output a token, in the attention that the config asks for.

    Same signature and result as verl.utils.model.load_valuehead_model. A policy checkpoint has no such head: it is
    drawn fresh, from the run's seed; a saved critic brings its own.
    """
    from transformers import AutoModelForTokenClassification

    return AutoModelForTokenClassification.from_pretrained(
        pretrained_model_name_or_path=local_path,
        torch_dtype=torch_dtype,
        config=model_config,
        attn_implementation=model_config._attn_implementation,
        trust_remote_code=trust_remote_code,
    )


def logprobs_by_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """log softmax(logits)[label], without a Python loop over tokens.

    Args:
        logits: (..., vocabulary), any float type.
        labels: (...), int64.

    Returns:
        (...), in float32 for half-precision logits (the reduction is done there), else in the logits' type.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    if flat.dtype in (torch.float16, torch.bfloat16):
        flat = flat.float()
    loss = torch.nn.functional.cross_entropy(flat, labels.reshape(-1), reduction="none")
    return -loss.view(labels.shape)


def no_offload_policy(pin_memory: bool = True) -> None:
    """No offload for a model that stays where it is: verl forces one on the reference model."""


def leave_whole(model: torch.nn.Module, fsdp_kwargs: dict[str, Any], config: Any) -> None:
    """One device has nothing to shard: the model stays a plain module, which verl's engine treats as "version 0".

    Same signature as verl.utils.fsdp_utils.apply_fsdp2. Mixed precision is left to autocast, which verl's engine
    opens in any case (transformer_impl.py:1553): weights and gradients stay float32, products are taken in bf16.
    """


def move_to_device(
    model: torch.nn.Module, full_state: dict[str, Any], device_mesh: Any = None, cpu_offload: Any = None
) -> None:
    """The model to its device; its weights are there already. As verl.utils.fsdp_utils.fsdp2_load_full_state_dict."""
    from verl.utils.device import get_device_id

    model.to(get_device_id())


def _common_shims() -> list[Shim]:
    from verl.utils import model, torch_functional

    return [
        Shim(
            module=model,
            name="load_valuehead_model",
            replacement=load_value_head_model,
            why="it hard-codes flash_attention_2 and asks for trl, which verl 0.9.1 cannot stand beside",
            where="verl/utils/model.py:640-686",
        ),
        Shim(
            module=torch_functional,
            name="logprobs_from_logits_v2",
            replacement=logprobs_by_cross_entropy,
            why="without flash-attn verl loops over tokens in Python: 5 times slower at a vocabulary of 49k",
            where="verl/utils/torch_functional.py:175-213",
        ),
    ]


def _resident_reference_shim() -> Shim:
    from verl.workers.engine.fsdp import transformer_impl

    return Shim(
        module=transformer_impl,
        name="CPUOffloadPolicy",
        replacement=no_offload_policy,
        why="the frozen reference is forced to pinned host memory: fails without an accelerator, costs a copy with one",
        where="verl/workers/engine/fsdp/transformer_impl.py:453-463",
    )


def _unsharded_shims() -> list[Shim]:
    from verl.workers.engine.fsdp import transformer_impl

    why = "on one device FSDP2 moves every weight through a gather of one rank, in each forward and backward"
    where = "verl/workers/engine/fsdp/transformer_impl.py:471-473"
    return [
        Shim(module=transformer_impl, name="apply_fsdp2", replacement=leave_whole, why=why, where=where),
        Shim(
            module=transformer_impl, name="fsdp2_load_full_state_dict", replacement=move_to_device, why=why, where=where
        ),
    ]


def shims_for(device: str, *, reference_on_device: bool, one_device: bool) -> list[Shim]:
    """The shims of a run on `device` ("cpu" or "cuda"). Imports verl's engine."""
    shims = _common_shims()
    if one_device:
        shims += _unsharded_shims()
    if device == "cpu" or reference_on_device:
        shims.append(_resident_reference_shim())
    return shims


def register_cpu_engines() -> None:
    """Register verl's FSDP engines for "cpu" too (transformer_impl.py:1143 and :1594 name cuda and npu only)."""
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

    for model_type, engine in (("language_model", FSDPEngineWithLMHead), ("value_model", FSDPEngineWithValueHead)):
        if "cpu" not in EngineRegistry._engines[model_type]["fsdp2"]:
            EngineRegistry.register(model_type=model_type, backend=["fsdp2"], device="cpu")(engine)


def register_rollout() -> None:
    """Add the `hf` engine to verl's rollout table (workers/rollout/base.py:88 knows vllm, sglang and trtllm)."""
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY

    _ROLLOUT_REGISTRY[HF_ROLLOUT] = HF_ROLLOUT_CLASS


def install(device: str, *, reference_on_device: bool = True, one_device: bool = True) -> Callable[[], None]:
    """Make verl ready for a run on `device`. Returns the undo of what was replaced (registrations stay).

    Args:
        device: "cpu" or "cuda".
        reference_on_device: the frozen reference stays on the device instead of in pinned host memory.
        one_device: this process is the whole run; models are not sharded.

    Raises:
        UserError: another verl than SUPPORTED_VERL is installed.
    """
    require_supported_verl()
    if device == "cpu":
        register_cpu_engines()
    register_rollout()
    return replace_names(shims_for(device, reference_on_device=reference_on_device, one_device=one_device))


def replace_names(shims: list[Shim]) -> Callable[[], None]:
    """Set each name to its replacement; the returned call puts the old ones back. A missing name is an error."""
    old = [(shim.module, shim.name, getattr(shim.module, shim.name)) for shim in shims]
    for shim in shims:
        setattr(shim.module, shim.name, shim.replacement)

    def undo() -> None:
        for module, name, value in old:
            setattr(module, name, value)

    return undo
