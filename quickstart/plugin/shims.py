"""The verl functions that need a replacement, one class of fault each. Applied by :func:`install`, removed by its undo.

verl's own doors (registries, config keys) are used wherever there is one; what is left here cannot be reached through
a door in 0.9.1. Each shim names the file and line that makes it needed; tests/test_plugin_shims.py holds each one to
verl's text, and :func:`require_supported_verl` refuses any other version before a shim is applied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from quickstart.errors import Fault, UserError
from quickstart.plugin import SUPPORTED_VERL, attention
from quickstart.plugin.fused_head import patch_one_model
from quickstart.plugin.graphed_body import Arena, graph_body
from quickstart.plugin.lean_layers import make_lean, store_products
from quickstart.plugin.model_class import text_class_first
from quickstart.plugin.nested_rows import chunk_rows, select_rows
from quickstart.plugin.retry import Halving

ROLLOUTS = {
    ("hf", "async"): "quickstart.plugin.rollout.LocalRollout",
    ("vllm", "async"): "quickstart.plugin.vllm_rollout.VllmRollout",  # verl's is a server in processes of Ray's
}


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


def load_on_device(use_meta_tensor: bool = True, mesh: Any = None) -> Callable[[], torch.device]:
    """Checkpoints are read straight to the device. As verl.utils.fsdp_utils.get_init_weight_context_manager.

    verl reads them to host memory and moves them, since FSDP shards from there: one copy of the model in float32 more,
    and a second a model.
    """
    from verl.utils.device import get_device_id, get_device_name

    index = get_device_id()
    return lambda: torch.device(get_device_name(), index) if isinstance(index, int) else torch.device(index)


@functools.cache
def tokenizer_once(name_or_path: str, **kwargs: Any) -> Any:
    """verl.utils.tokenizer.hf_tokenizer, once a run: verl loads it for every role, a second each at 150,000 tokens."""
    from verl.utils.tokenizer import hf_tokenizer

    return hf_tokenizer(name_or_path, **kwargs)


@functools.cache
def processor_once(name_or_path: str, **kwargs: Any) -> Any:
    """verl.utils.tokenizer.hf_processor, once a run: for a text model it looks for an image processor in vain."""
    from verl.utils.tokenizer import hf_processor

    return hf_processor(name_or_path, **kwargs)


def leave_whole(
    arena: Arena | None, tell: Callable[[str], None] = print
) -> Callable[[torch.nn.Module, dict[str, Any], Any], None]:
    """One device has nothing to shard: the model stays a plain module, which verl's engine treats as "version 0".

    Stands for verl.utils.fsdp_utils.apply_fsdp2. Mixed precision is left to autocast, which verl's engine opens in any
    case (transformer_impl.py:1553): weights and gradients stay float32, products are taken in bf16.

    Args:
        arena: where passes are captured as CUDA graphs; None: they are not. Weights that move to the host between two
            passes cannot be in a graph.
        tell: told when capturing fails.
    """

    def apply(model: torch.nn.Module, fsdp_kwargs: dict[str, Any], config: Any) -> None:
        from verl.utils.torch_dtypes import PrecisionType

        if arena is None:
            return
        attention.choose_by_length(model)
        make_lean(model)
        if config.forward_only and config.mixed_precision:
            store_products(model, PrecisionType.to_dtype(config.mixed_precision["param_dtype"]))
        if not config.param_offload:
            graph_body(model, arena, tell)

    return apply


def move_to_device(
    model: torch.nn.Module, full_state: dict[str, Any], device_mesh: Any = None, cpu_offload: Any = None
) -> None:
    """The model to its device; its weights are there already. As verl.utils.fsdp_utils.fsdp2_load_full_state_dict."""
    from verl.utils.device import get_device_id

    model.to(get_device_id())


def tokenizer_with_trust(trust_remote_code: bool) -> Callable[..., Any]:
    """hf_tokenizer for the reward worker, which asks to run any code that comes with a tokenizer."""

    def load(name_or_path: str, **_: Any) -> Any:
        return tokenizer_once(name_or_path, trust_remote_code=trust_remote_code)

    return load


def _common_shims(trust_remote_code: bool) -> list[Shim]:
    from verl.experimental.reward_loop import reward_loop
    from verl.utils import model, tensordict_utils, torch_functional
    from verl.workers.config import model as model_config

    again = "each role loads tokenizer and processor again"
    config_file, reward_file = "verl/workers/config/model.py:161", "verl/experimental/reward_loop/reward_loop.py:125"
    return [
        Shim(module=model_config, name="hf_tokenizer", replacement=tokenizer_once, why=again, where=config_file),
        Shim(module=model_config, name="hf_processor", replacement=processor_once, why=again, where=config_file),
        Shim(
            module=reward_loop,
            name="hf_tokenizer",
            replacement=tokenizer_with_trust(trust_remote_code),
            why=again + ", and this one with trust_remote_code=True whatever the user said",
            where=reward_file,
        ),
        Shim(
            module=model,
            name="load_valuehead_model",
            replacement=load_value_head_model,
            why="it hard-codes flash_attention_2 and asks for trl, which verl 0.9.1 cannot stand beside",
            where="verl/utils/model.py:640-686",
        ),
        Shim(
            module=model,
            name="get_hf_auto_model_class",
            replacement=text_class_first(model.get_hf_auto_model_class),
            why="to see that a model shows no images it imports all that do: 0.5 s",
            where="verl/utils/model.py:693-711",
        ),
        Shim(
            module=torch_functional,
            name="logprobs_from_logits_v2",
            replacement=logprobs_by_cross_entropy,
            why="without flash-attn verl loops over tokens in Python: 5 times slower at a vocabulary of 49k",
            where="verl/utils/torch_functional.py:175-213",
        ),
        Shim(
            module=tensordict_utils,
            name="index_select_tensor_dict",
            replacement=select_rows(tensordict_utils.index_select_tensor_dict),
            why="all rows are unbound for each mini batch: time grows with the square of the batch",
            where="verl/utils/tensordict_utils.py:458",
        ),
        Shim(
            module=tensordict_utils,
            name="chunk_tensordict",
            replacement=chunk_rows(tensordict_utils.chunk_tensordict),
            why="a mini batch that is one micro batch is taken apart and put together again",
            where="verl/utils/tensordict_utils.py:302",
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


def merge_adapters(module: torch.nn.Module, do_merge: bool) -> None:
    """LoRA into a whole model's weights, or out of them. As verl.utils.fsdp_utils.fsdp_merge_unmerge."""
    from verl.utils.fsdp_utils import _merge_or_unmerge_lora_

    _merge_or_unmerge_lora_(module, merge=do_merge)


def _unsharded_shims(device: str, halving: Halving) -> list[Shim]:
    from verl.models.transformers import monkey_patch
    from verl.utils import fsdp_utils
    from verl.workers.engine.fsdp import transformer_impl

    why = "on one device FSDP2 moves every weight through a gather of one rank, in each forward and backward"
    where = "verl/workers/engine/fsdp/transformer_impl.py:471-473"
    return [
        Shim(
            module=transformer_impl,
            name="get_init_weight_context_manager",
            replacement=load_on_device,
            why="weights are read to host memory first, to be sharded from there",
            where="verl/workers/engine/fsdp/transformer_impl.py:266",
        ),
        Shim(
            module=transformer_impl,
            name="apply_fsdp2",
            replacement=leave_whole(Arena() if device == "cuda" else None, halving.tell),
            why=why,
            where=where,
        ),
        Shim(
            module=transformer_impl,
            name="apply_monkey_patch",
            replacement=patch_one_model(monkey_patch.apply_monkey_patch),
            why="fused log-probs are put on the model's class, which the rollout's model is of too",
            where="verl/models/transformers/monkey_patch.py:286",
        ),
        Shim(
            module=transformer_impl, name="fsdp2_load_full_state_dict", replacement=move_to_device, why=why, where=where
        ),
        Shim(
            module=fsdp_utils,
            name="fsdp_merge_unmerge",
            replacement=merge_adapters,
            why="it refuses a model that is not sharded, so that LoRA weights could be neither exported nor synced",
            where="verl/utils/fsdp_utils.py:909-931",
        ),
        Shim(
            module=transformer_impl.FSDPEngine,
            name="forward_backward_batch",
            replacement=halving.around(transformer_impl.FSDPEngine.forward_backward_batch),
            why="a pass that runs out of memory ends the run with a traceback, where halves of it would fit",
            where="verl/workers/engine/fsdp/transformer_impl.py:724",
        ),
    ]


def shims_for(
    device: str,
    *,
    reference_on_device: bool = True,
    one_device: bool = True,
    trust_remote_code: bool = False,
    halving: Halving | None = None,
) -> list[Shim]:
    """The shims of a run on `device` ("cpu" or "cuda"). Imports verl's engine."""
    shims = _common_shims(trust_remote_code)
    if one_device:
        shims += _unsharded_shims(device, halving or Halving())
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
    """Put our engines into verl's rollout table (workers/rollout/base.py:88 knows vllm, sglang and trtllm)."""
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY

    _ROLLOUT_REGISTRY.update(ROLLOUTS)


def install(
    device: str,
    *,
    reference_on_device: bool = True,
    one_device: bool = True,
    trust_remote_code: bool = False,
    halving: Halving | None = None,
) -> Callable[[], None]:
    """Make verl ready for a run on `device`. Returns the undo of what was replaced (registrations stay).

    Args:
        device: "cpu" or "cuda".
        reference_on_device: the frozen reference stays on the device instead of in pinned host memory.
        one_device: this process is the whole run; models are not sharded.
        trust_remote_code: whether code that comes with a tokenizer may run.
        halving: retries passes that run out of memory, on one device.

    Raises:
        UserError: another verl than SUPPORTED_VERL is installed.
    """
    require_supported_verl()
    from verl.utils.device import set_expandable_segments

    # verl turns this on with the first rollout (engine_workers.py:827). Here from the start, and without rollouts too:
    # graphs of batches longer than those before them need blocks larger than any that are free, and without it each
    # length keeps blocks of its own (40 GiB reserved, 26 used, for DPO on a 0.5B model)
    set_expandable_segments(True)
    if device == "cpu":
        register_cpu_engines()
    register_rollout()
    names_back = replace_names(
        shims_for(
            device,
            reference_on_device=reference_on_device,
            one_device=one_device,
            trust_remote_code=trust_remote_code,
            halving=halving,
        )
    )
    cudnn_back = attention.without_cudnn()

    def undo() -> None:
        cudnn_back()
        names_back()

    return undo


def replace_names(shims: list[Shim]) -> Callable[[], None]:
    """Set each name to its replacement; the returned call puts the old ones back. A missing name is an error."""
    old = [(shim.module, shim.name, getattr(shim.module, shim.name)) for shim in shims]
    for shim in shims:
        setattr(shim.module, shim.name, shim.replacement)

    def undo() -> None:
        for module, name, value in old:
            setattr(module, name, value)

    return undo
