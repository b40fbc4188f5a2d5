"""One decode step of a decoder with half its kernels: projections multiplied together, keys turned and stored in place.

A captured step of a small model is bound by the start of each kernel (3 to 4 microseconds, 900 of them for 24 layers),
not by what they compute. For one new token a row, transformers' attention multiplies three times where once will do,
turns queries and keys apart in ten kernels, and works out where to store in every layer. Only for families whose
layers are known to be these; more than one new token (the prompt) goes transformers' way.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from quickstart.plugin.lean_layers import is_known


class DecodeCache(StaticCache):
    """Keys and values of the full length, and where the next token lies in them.

    Args:
        column: (1,) int64, on the model's device.
        lean: whether every layer stores at `column`, so that transformers' own counters are not moved.
    """

    def __init__(self, *, column: torch.Tensor, lean: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.column, self.lean = column, lean

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *more: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As StaticCache, which keeps values in the type of the keys; under autocast they come in two."""
        kind = self.layers[layer_idx].keys.dtype
        return super().update(key_states.to(kind), value_states.to(kind), layer_idx, *more, **kwargs)


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """sdpa that never copies keys and values for grouped-query attention while decoding.

    transformers repeats K and V for each query head once a mask is given (sdpa_attention.py, use_gqa_in_sdpa): 7 times
    the cache's traffic for Qwen2-0.5B. With one query a row, the query heads of a group can stand where query
    positions stand: they attend to the same keys under the same mask.

    Args:
        query: (rows, heads, queries, head size); key, value: (rows, kv heads, length, head size).
        attention_mask: (rows, 1, queries, length), True where attended, or 0 there and -inf elsewhere.

    Returns:
        (rows, queries, heads, head size) and None, as transformers' attention functions.
    """
    rows, heads, queries, size = query.shape
    if queries > 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    kv_heads = key.shape[1]
    out = torch.nn.functional.scaled_dot_product_attention(
        query.view(rows, kv_heads, heads // kv_heads, size),
        key,
        value,
        attn_mask=attention_mask,
        scale=kwargs.get("scaling"),
    )
    return out.reshape(rows, 1, heads, size), None


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864), halves paired, as transformers' families.

    Args:
        x: (rows, heads, size); cos, sin: (rows, 1, size).
    """
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


def lean_attention(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As the attention of transformers' Qwen2, Qwen3, Llama and Mistral, for one new token a row.

    Args:
        hidden_states: (rows, 1, size).
        attention_mask: (rows, 1, 1, length), 0 where attended and -inf elsewhere.
    """
    is_decoding = hidden_states.shape[1] == 1 and isinstance(past_key_values, DecodeCache) and past_key_values.lean
    if not is_decoding:
        return self._whole(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
    rows, size = len(hidden_states), self.head_dim
    projected = nn.functional.linear(hidden_states, self._joined, self._joined_bias).view(rows, -1, size)
    values = past_key_values.layers[self.layer_idx].values
    keys = past_key_values.layers[self.layer_idx].keys
    kv_heads = keys.shape[1]
    heads = projected.shape[1] - 2 * kv_heads
    to_turn = projected[:, : heads + kv_heads]
    if hasattr(self, "q_norm"):
        to_turn = torch.cat([self.q_norm(to_turn[:, :heads]), self.k_norm(to_turn[:, heads:])], dim=1)
    both = turned(to_turn, *position_embeddings)
    keys.index_copy_(2, past_key_values.column, both[:, heads:, None])
    values.index_copy_(2, past_key_values.column, projected[:, heads + kv_heads :, None])
    out, _ = grouped_attention(self, both[:, :heads, None], keys, values, attention_mask, scaling=self.scaling)
    return self.o_proj(out.reshape(rows, 1, heads * size)), None


def lean_swiglu(self: Any, x: torch.Tensor) -> torch.Tensor:
    """down(silu(gate(x)) * up(x)), gate and up multiplied together."""
    gate, up = nn.functional.linear(x, self._joined).chunk(2, dim=-1)
    return self.down_proj(nn.functional.silu(gate).mul_(up))


def join_projections(model: nn.Module) -> bool:
    """Let a model that only generates decode this way. Its weights must be its own: they move to new memory.

    Parameters keep their names and shapes; each becomes a part of a joined one.

    Returns:
        whether the model's family is known; if not, nothing is changed.
    """
    if not is_known(model):
        return False
    for module in model.modules():
        if hasattr(module, "q_proj"):
            _join(module, ("q_proj", "k_proj", "v_proj"))
            module._whole = module.forward
            module.forward = MethodType(lean_attention, module)
        elif hasattr(module, "gate_proj"):
            _join(module, ("gate_proj", "up_proj"))
            module.forward = MethodType(lean_swiglu, module)
    return True


@torch.no_grad()
def _join(module: Any, names: tuple[str, ...]) -> None:
    layers = [getattr(module, name) for name in names]
    sizes = [layer.out_features for layer in layers]
    module._joined = torch.cat([layer.weight for layer in layers])
    module._joined_bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
    for layer, weight in zip(layers, module._joined.split(sizes), strict=True):
        layer.weight.data = weight
    if module._joined_bias is not None:
        for layer, bias in zip(layers, module._joined_bias.split(sizes), strict=True):
            layer.bias.data = bias
