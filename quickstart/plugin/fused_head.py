"""Log-probs and entropy straight from the last hidden state, so that the logits of a micro batch never exist at once.

20 rows of 175 tokens over a vocabulary of 151,936 are 1 GB of bf16 logits, and 8 GB with their float32 copies and
gradients. verl has the remedy (use_fused_kernels with impl_backend torch: chunks of tokens, logits made again in the
backward pass), but two things keep it from a run in one process, and are all that is different here: it replaces the
forward of the class, and with it the rollout's; and it multiplies in float32 in the backward pass, where autocast is
over.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

CHUNK = 512  # tokens whose logits exist at once: 0.3 GB in float32 at a vocabulary of 151,936, up to five times


def forward_with_log_probs(
    self: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    use_cache: bool | None = None,
    temperature: float = 1.0,
    shift_labels: torch.Tensor | None = None,
    return_dict: bool = True,
) -> Any:
    """A causal model's forward as verl's engine calls it with use_fused_kernels (transformer_impl.py:1315).

    As verl.models.transformers.dense_common.forward_with_torch_backend.

    Args:
        input_ids, attention_mask, position_ids: (rows, length).
        shift_labels: (rows, length) the token that each place predicts; default: input_ids shifted by one.

    Returns:
        log_probs (rows, length) in float32, entropy (rows, length).
    """
    from verl.models.transformers.dense_common import CausalLMOutputForPPO
    from verl.utils.experimental.torch_functional import FusedLinearForPPOFunction

    out = self.base_model(
        input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
    )
    hidden, weight = out[0], self.lm_head.weight
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        kind = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(kind), weight.to(kind)
    labels = torch.roll(input_ids, shifts=-1, dims=-1) if shift_labels is None else shift_labels
    log_probs, entropy = FusedLinearForPPOFunction.apply(hidden.contiguous(), weight, labels, temperature, CHUNK)
    return CausalLMOutputForPPO(log_probs=log_probs, entropy=entropy)


def patch_one_model(original: Callable[..., None]) -> Callable[..., None]:
    """verl's apply_monkey_patch, with the fused head on this model instead of on its class.

    Args:
        original: verl.models.transformers.monkey_patch.apply_monkey_patch.
    """

    def patch(model: Any, *, use_fused_kernels: bool = False, fused_kernels_backend: str | None = None, **more: Any):
        if not use_fused_kernels or fused_kernels_backend != "torch":
            return original(
                model=model, use_fused_kernels=use_fused_kernels, fused_kernels_backend=fused_kernels_backend, **more
            )
        original(model=model, use_fused_kernels=False, **more)
        model.forward = MethodType(forward_with_log_probs, model)
        return None

    return patch
