"""The same layers with less kept for the backward pass and fewer kernels: RMSNorm and SwiGLU of transformers' decoders.

For each token and layer of a 0.5B model transformers keeps about 75 KB under autocast, most of it twice: RMSNorm's
float32 intermediates, its output in float32 and once more in bf16 for each projection that reads it, and SwiGLU's
silu(gate) and product beside gate and up. Here RMSNorm is PyTorch's fused one, rounded once to the type in which its
readers multiply in any case, and SwiGLU makes its product again in the backward pass.

Only for families whose layers are known to be these; checked on random numbers before a layer is replaced.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn

FAMILIES = ("qwen2", "qwen3", "llama", "mistral")


def lean_norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467): x / sqrt(mean(x^2) + eps) * weight, over the last axis.

    Under autocast the result is in autocast's type: what reads it is a projection, which would round it itself.
    """
    if hidden_states.dtype == self.weight.dtype and not torch.is_autocast_enabled(hidden_states.device.type):
        # one kernel, which computes in float32 and rounds once
        return nn.functional.rms_norm(hidden_states, (hidden_states.shape[-1],), self.weight, self._epsilon)
    out = nn.functional.rms_norm(hidden_states.float(), (hidden_states.shape[-1],), self.weight.float(), self._epsilon)
    device = hidden_states.device.type
    kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_states.dtype
    return out.to(kind)


class SiluTimes(torch.autograd.Function):
    """silu(gate) * up, from gate and up alone in both directions (Shazeer 2020, arXiv 2002.05202)."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), grad * nn.functional.silu(gate)


def lean_mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
    """down(silu(gate(x)) * up(x))."""
    return self.down_proj(SiluTimes.apply(self.gate_proj(x), self.up_proj(x)))


def is_known(model: nn.Module) -> bool:
    """Whether the model is of one of these families."""
    return getattr(getattr(model, "config", None), "model_type", None) in FAMILIES


def attends_to_all(config: Any) -> bool:
    """Whether every layer of a model with this transformers config attends to the full length."""
    return set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}


def make_lean(model: nn.Module) -> int:
    """Replace the forward of the model's norms and MLPs. Returns how many were replaced; 0 for other families."""
    if not is_known(model):
        return 0
    return sum(_replaced(module) for module in model.modules())


def _replaced(module: Any) -> bool:
    if type(module).__name__.endswith("RMSNorm"):
        module._epsilon = module.variance_epsilon
        return _take(module, lean_norm, module.weight.shape[-1])
    is_swiglu = all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj"))
    if is_swiglu and isinstance(module.gate_proj, nn.Linear) and "silu" in type(module.act_fn).__name__.lower():
        return _take(module, lean_mlp, module.gate_proj.in_features)
    return False


@torch.no_grad()
def _take(module: Any, forward: Any, size: int) -> bool:
    """Put `forward` in place if it gives what the module gives."""
    parameter = next(module.parameters())
    if parameter.device.type == "meta":  # empty until the actor's weights arrive: nothing to compare with
        module.forward = MethodType(forward, module)
        return True
    probe = torch.randn(2, size, generator=torch.Generator().manual_seed(0)).to(parameter)
    expected = module(probe)
    if not torch.allclose(forward(module, probe).float(), expected.float(), rtol=1e-2, atol=1e-3):
        return False
    module.forward = MethodType(forward, module)
    return True


def store_products(model: nn.Module, kind: torch.dtype) -> None:
    """Weights of a model that is not trained, in the type in which autocast multiplies them: the same results.

    Norms and embeddings, and a head that shares its weight with these, stay as they are.
    """
    shared = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    for module in model.modules():
        if isinstance(module, nn.Linear) and id(module.weight) not in shared:
            module.to(kind)
