"""Log-probs and entropy straight from the last hidden state, so that the logits of a micro batch never exist at once.

20 rows of 175 tokens over a vocabulary of 151,936 are 1 GB of bf16 logits, and 8 GB with their float32 copies and
gradients. verl has the remedy (use_fused_kernels with impl_backend torch: chunks of tokens, logits made again in the
backward pass), but it replaces the forward of the class, and with it the rollout's; it multiplies in float32 in the
backward pass, where autocast is over; and it goes over the logits of each chunk some twenty times, entropy included
where nobody asked for it, which is most of what an update of a 0.5B model costs. Here a chunk is gone over as often as
the result needs, in two buffers, and tokens without a gradient (the prompt's) are left out of the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch

CHUNK = 512  # tokens whose logits exist at once: 0.8 GB at a vocabulary of 151,936, in bf16 and twice in float32


@dataclass(frozen=True, kw_only=True)
class FusedOutput:
    """What verl's engine reads with use_fused_kernels (transformer_impl.py:1461-1475)."""

    log_probs: torch.Tensor  # (rows, length), float32
    _hidden: torch.Tensor
    _weight: torch.Tensor
    _labels: torch.Tensor
    _temperature: float

    @property
    def entropy(self) -> torch.Tensor:
        """(rows, length), float32. Made when it is read: most passes do not need it. With a gradient it is verl's."""
        with torch.autocast(self._hidden.device.type, enabled=False):
            if torch.is_grad_enabled():
                from verl.utils.experimental.torch_functional import FusedLinearForPPOFunction

                return FusedLinearForPPOFunction.apply(self._hidden, self._weight, self._labels, self._temperature)[1]
            return entropy_of(self._hidden.flatten(0, -2), self._weight, self._temperature).view(self._labels.shape)


class HeadLogProbs(torch.autograd.Function):
    """log softmax(hidden @ weight.T / temperature)[label], in float32.

    Args:
        hidden: (tokens, size); weight: (vocabulary, size), of the type in which they are multiplied.
        labels: (tokens,).

    Returns:
        (tokens,) float32.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, temperature: float
    ) -> torch.Tensor:
        log_probs = torch.empty(len(labels), dtype=torch.float32, device=hidden.device)
        logsumexp = torch.empty_like(log_probs)
        for part, scores in _chunks(hidden, weight, temperature):
            log_probs[part] = scores.log_softmax(-1, dtype=torch.float32).gather(-1, labels[part, None])[:, 0]
            logsumexp[part] = scores.gather(-1, labels[part, None])[:, 0].float() - log_probs[part]
        ctx.save_for_backward(hidden, weight, labels, logsumexp)
        ctx.temperature = temperature
        return log_probs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        """d log p(label) / d logits = onehot - p, divided by the temperature."""
        hidden, weight, labels, logsumexp = ctx.saved_tensors
        used = grad.nonzero()[:, 0]
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        hidden, labels = hidden[used], labels[used, None]
        logsumexp, grad = logsumexp[used, None], grad[used, None].float() / ctx.temperature
        for part, scores in _chunks(hidden, weight, ctx.temperature):
            probs = torch.sub(scores, logsumexp[part]).exp_()  # float32, as the sum is
            at_label = grad[part] * (1 - probs.gather(-1, labels[part]))
            grad_logits = torch.mul(probs, -grad[part], out=scores)
            grad_logits.scatter_(-1, labels[part], at_label.to(scores.dtype))
            grad_hidden[used[part]] = grad_logits @ weight
            grad_weight.addmm_(grad_logits.t(), hidden[part])
        return grad_hidden, grad_weight, None, None


def entropy_of(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    """Entropy of each token's distribution in nats, (tokens,) float32; without a gradient."""
    parts = []
    for _, scores in _chunks(hidden, weight, temperature):
        log_probs = scores.log_softmax(-1, dtype=torch.float32)
        parts.append(-torch.linalg.vecdot(log_probs.exp(), log_probs))
    return torch.cat(parts)


def _chunks(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> Iterator[tuple[slice, torch.Tensor]]:
    """Logits over the temperature, chunk by chunk, in one buffer: (tokens of the chunk, vocabulary)."""
    buffer = hidden.new_empty(min(CHUNK, len(hidden)), len(weight))
    for start in range(0, len(hidden), CHUNK):
        part = slice(start, min(start + CHUNK, len(hidden)))
        scores = torch.mm(hidden[part], weight.t(), out=buffer[: part.stop - start])
        yield part, scores if temperature == 1 else scores.div_(temperature)


def forward_with_log_probs(
    self: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    temperature: float | None = None,
    shift_labels: torch.Tensor | None = None,
    **more: Any,
) -> Any:
    """A causal model's forward as verl's engine calls it with use_fused_kernels (transformer_impl.py:1315).

    As verl.models.transformers.dense_common.forward_with_torch_backend. The engine always names a temperature; a call
    without one, as when answers are generated with this model, gets the class's own forward.

    Args:
        input_ids, attention_mask, position_ids: (rows, length).
        shift_labels: (rows, length) the token that each place predicts; default: input_ids shifted by one.
    """
    if temperature is None:
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        return type(self).forward(self, **inputs, **more)
    out = self.base_model(
        input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
    )
    hidden, weight = out[0], self.lm_head.weight
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        kind = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(kind), weight.to(kind)
    hidden = hidden.contiguous()
    labels = torch.roll(input_ids, shifts=-1, dims=-1) if shift_labels is None else shift_labels
    with torch.autocast(device, enabled=False):  # types are as wanted by now; autocast would copy for the softmax
        log_probs = HeadLogProbs.apply(hidden.flatten(0, -2), weight, labels.flatten(), temperature)
    return FusedOutput(
        log_probs=log_probs.view(labels.shape),
        _hidden=hidden,
        _weight=weight,
        _labels=labels,
        _temperature=temperature,
    )


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
