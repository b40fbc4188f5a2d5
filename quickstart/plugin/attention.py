"""Which kernels torch's scaled_dot_product_attention takes on a GPU: cuDNN's for long sequences only.

torch 2.11 takes cuDNN first on Hopper and Blackwell, and cuDNN compiles a plan for every shape that it has not seen. On
an H200 (14 heads, a mask, forward and backward of one layer) the first one takes 1.7 s, later ones 0.12 to 1 s, and a
run meets a new shape whenever the longest answer of a batch has a new length. What it gives for that: 0.49 instead of
0.64 ms with 20 rows of 192 tokens, 0.92 instead of 1.60 with 640, 1.04 instead of 2.64 with 4 rows of 2,048.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quickstart.plugin.graphed_body import LENGTH_STEP

CUDNN_FROM = 512  # tokens; shorter ones do not earn a plan back within some dozens of steps


def without_cudnn() -> Callable[[], None]:
    """No plans from here on, but for models of :func:`choose_by_length`. The returned call puts the choice back."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    return lambda: torch.backends.cuda.enable_cudnn_sdp(before)


def choose_by_length(model: torch.nn.Module) -> None:
    """Every pass of this model chooses for its own length, whatever ran before it, and leaves no plans to others.

    After a pass with gradients the choice stays until the next one: layers that are computed again in the backward pass
    must find the same.
    """
    model.register_forward_pre_hook(_choose, with_kwargs=True)
    model.register_forward_hook(_put_back, always_call=True)


def never_plan(model: torch.nn.Module) -> None:
    """No pass of this model makes plans: a rollout reads the prompts of a batch once, in a shape of their own."""
    model.register_forward_pre_hook(_refuse)


def _choose(model: torch.nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
    ids = inputs.get("input_ids")
    # rounded as the graphs of the model's body are, so that the passes before a capture choose as it does
    length = 0 if ids is None else -(-ids.shape[-1] // LENGTH_STEP) * LENGTH_STEP
    torch.backends.cuda.enable_cudnn_sdp(length >= CUDNN_FROM)


def _put_back(model: torch.nn.Module, args: Any, out: Any) -> None:
    if not torch.is_grad_enabled():
        torch.backends.cuda.enable_cudnn_sdp(False)


def _refuse(model: torch.nn.Module, args: Any) -> None:
    torch.backends.cuda.enable_cudnn_sdp(False)
