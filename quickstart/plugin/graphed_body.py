"""A model's body as two captured CUDA graphs a shape: forward, and backward with its gradients added up.

One update of a small model is bound by the host: of 170 ms that a micro batch of 20 rows of a 0.5B model takes on an
H200, the device works 21 (some 2,500 kernel launches, half of them casts to bf16). So a shape that comes again is
captured once and replayed. Only the body is captured (embeddings in, last hidden state out): the head and the loss, and
with them all of verl's text, run as they are.

- A shape is captured after :data:`CAPTURE_AFTER` eager passes, so that a short run does not pay for it; after one where
  graphs are in use already. Lengths are rounded up to :data:`LENGTH_STEP`; no more than :data:`MOST_GRAPHS` shapes a
  model, the rest stays eager.
- All graphs of a run share one memory pool: nothing of a pass is needed once the next one starts (verl does forward and
  backward of one micro batch after the other).
- Gradients go to buffers that stay where they are, as a graph needs it, and all models of a run share them: verl sets
  gradients to None before it starts on a mini batch (engine_workers.py: train_batch), so only one model's are alive.

On a CPU the same code runs without graphs, which is how the tests reach it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPast

from quickstart.plugin.lean_layers import attends_to_all

CAPTURE_AFTER = 8
LENGTH_STEP = 32
MOST_GRAPHS = 6


class Arena:
    """What the bodies of one run share: a memory pool for graphs, and gradient buffers by type."""

    def __init__(self) -> None:
        self.pool: Any = None
        self._flat: dict[torch.dtype, torch.Tensor] = {}

    def buffers(self, parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
        """A gradient buffer for each parameter; the same memory for every caller that is no larger than the first."""
        size = sum(p.numel() for p in parameters)
        kind, device = parameters[0].dtype, parameters[0].device
        flat = self._flat.get(kind)
        if flat is None or flat.numel() < size:
            flat = self._flat[kind] = torch.zeros(size, dtype=kind, device=device)
        parts = flat[:size].split([p.numel() for p in parameters])
        return [part.view_as(p) for part, p in zip(parts, parameters, strict=True)]


@dataclass(kw_only=True)
class _Pass:
    """One captured shape. Addresses stay, contents change."""

    hidden: torch.Tensor  # (rows, length, size): the embedded tokens
    mask: torch.Tensor  # (rows, 1, length, length) bool, True where attended
    positions: torch.Tensor  # (rows, length)
    out: torch.Tensor  # (rows, length, size): last hidden state
    forward: Callable[[], None]
    backward: Callable[[], None] | None = None
    grad_out: torch.Tensor | None = None
    grad_hidden: torch.Tensor | None = None
    addresses: list[int] = field(default_factory=list)  # of the parameters, as captured


class _Replay(torch.autograd.Function):
    """hidden -> last hidden state by replay; gradients of the body's parameters are added to their buffers."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, owner: GraphedBody, step: _Pass) -> torch.Tensor:
        ctx.owner, ctx.step = owner, step
        step.hidden.data.copy_(hidden)
        step.forward()
        return step.out.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.owner.take_gradients()
        if ctx.step.grad_out is None:
            ctx.step.grad_out = torch.zeros_like(ctx.step.out)
        ctx.step.grad_out.copy_(grad)
        ctx.step.backward()
        return ctx.step.grad_hidden, None, None


class GraphedBody:
    """Stands in the place of a body's `forward`. Anything that it does not know goes the old way.

    Args:
        body: a transformers decoder without head, all of its layers attending to the full length.
        arena: shared by the bodies of a run.
        tell: told when capturing fails.
    """

    def __init__(self, body: torch.nn.Module, arena: Arena, tell: Callable[[str], None] = print) -> None:
        self._body, self._arena, self._tell = body, arena, tell
        self._eager = body.forward
        self._seen: Counter[tuple[Any, ...]] = Counter()
        self._passes: dict[tuple[Any, ...], _Pass] = {}
        self._broken = False
        embedding = set(map(id, body.get_input_embeddings().parameters()))
        self._named = {name: p for name, p in body.named_parameters() if id(p) not in embedding}
        self._parameters = list(self._named.values())
        self._buffers: list[torch.Tensor] = []

    def __call__(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **more: Any,
    ) -> Any:
        """As the body's own forward."""
        plain = input_ids is not None and attention_mask is not None and position_ids is not None
        if self._broken or not plain or any(value not in (None, False) for value in more.values()):
            return self._plainly(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **more)
        assert input_ids is not None
        assert attention_mask is not None
        assert position_ids is not None
        rows, length = input_ids.shape
        key = (torch.is_grad_enabled(), rows, -(-length // LENGTH_STEP) * LENGTH_STEP, *_autocast(input_ids.device))
        self._seen[key] += 1
        # once another body has graphs, eager passes of this one would want as much memory again beside theirs
        enough = CAPTURE_AFTER if self._arena.pool is None else 1
        if self._seen[key] <= enough or (key not in self._passes and len(self._passes) >= MOST_GRAPHS):
            return self._plainly(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **more)
        hidden = self._body.get_input_embeddings()(torch.nn.functional.pad(input_ids, (0, key[2] - length)))
        step = self._passes.get(key)
        if step is None or step.addresses != [p.data_ptr() for p in self._parameters]:
            step = self._captured(key[0], hidden)
        if step is None:
            return self._plainly(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **more)
        self._passes[key] = step
        fill_mask(step.mask, attention_mask)
        step.positions.zero_()
        step.positions[:, :length] = position_ids
        if key[0]:
            out = _Replay.apply(hidden, self, step)
        else:
            step.hidden.data.copy_(hidden)
            step.forward()
            out = step.out
        return BaseModelOutputWithPast(last_hidden_state=out[:, :length])

    def _plainly(self, **inputs: Any) -> Any:
        """The body's own forward. A pass reads each weight once, so that autocast's cache would only keep the casts of
        all of them until its end (0.7 GB for 0.5B weights), those of a capture in the graph's memory."""
        device = self._parameters[0].device
        enabled, dtype = _autocast(device)
        with torch.autocast(device.type, dtype=dtype, enabled=enabled, cache_enabled=False):
            return self._eager(**inputs)

    def _captured(self, with_gradients: bool, sample: torch.Tensor) -> _Pass | None:
        """A new pass; None where capturing fails, now and from now on. Its memory is free again by then."""
        fresh = self._arena.pool is None
        try:
            return self._capture(with_gradients, sample)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            why = str(error).strip().partition("\n")[0]
        self._broken = True
        self._passes.clear()
        if fresh:
            self._arena.pool = None
        if sample.device.type == "cuda":
            torch.cuda.empty_cache()
        name = type(self._body).__name__
        self._tell(f"Warning: no CUDA graphs for {name}, steps take longer without them: capturing failed with {why}")
        return None

    def release(self) -> None:
        """Free the captured passes, and capture anew: shapes have changed for good, or memory is short."""
        self._passes.clear()
        self._seen.clear()
        self._arena.pool = None  # a pool without graphs cannot be used again

    def take_gradients(self) -> None:
        """The buffers become the parameters' gradients, at zero where they are not yet."""
        if all(parameter.grad is None for parameter in self._parameters):
            torch._foreach_zero_(self._buffers)
            for parameter, buffer in zip(self._parameters, self._buffers, strict=True):
                parameter.grad = buffer
        for parameter, buffer in zip(self._parameters, self._buffers, strict=True):
            if parameter.grad is None:
                parameter.grad = buffer.zero_()
            elif parameter.grad is not buffer:  # an eager pass of this mini batch came first
                buffer.copy_(parameter.grad)
                parameter.grad = buffer

    def _capture(self, with_gradients: bool, sample: torch.Tensor) -> _Pass:
        rows, length, _ = sample.shape
        device = sample.device
        hidden = torch.empty_like(sample).requires_grad_(with_gradients)
        mask = torch.ones(rows, 1, length, length, dtype=torch.bool, device=device)
        positions = torch.zeros(rows, length, dtype=torch.int64, device=device)
        if with_gradients and not self._buffers:
            self._buffers = self._arena.buffers(self._parameters)

        # Leaves of its own in the parameters' memory. A parameter's place in autograd belongs to the stream of the pass
        # that made it, as long as that pass lives: verl holds the loss of one micro batch while it starts on the next,
        # and the stream of an eager pass cannot wait for one that is captured.
        leaves = {name: p.detach().requires_grad_(with_gradients) for name, p in self._named.items()}
        inputs = {"inputs_embeds": hidden, "attention_mask": mask, "position_ids": positions, "use_cache": False}

        def run() -> torch.Tensor:
            with torch.set_grad_enabled(with_gradients):
                return torch.func.functional_call(self._body, leaves, kwargs=inputs).last_hidden_state

        step = _Pass(hidden=hidden, mask=mask, positions=positions, out=sample, forward=_nothing)
        step.addresses = [p.data_ptr() for p in self._parameters]

        def forward() -> None:
            step.out = run()

        def backward() -> None:
            grads = torch.autograd.grad(step.out, (hidden, *leaves.values()), step.grad_out)
            torch._foreach_add_(self._buffers, list(grads[1:]))
            step.grad_hidden = grads[0]

        if device.type != "cuda":
            step.forward, step.backward = forward, backward if with_gradients else None
            return step
        return self._record(step, forward, backward if with_gradients else None)

    def _record(self, step: _Pass, forward: Callable[[], None], backward: Callable[[], None] | None) -> _Pass:
        """Capture. Nothing is computed meanwhile; the eager passes before have loaded every kernel."""
        if self._arena.pool is None:
            self._arena.pool = torch.cuda.graph_pool_handle()
        step.forward = self._graph(forward).replay
        if backward:
            step.grad_out = torch.zeros_like(step.out)  # of the body's type, which may not be that of the embeddings
            step.backward = self._graph(backward).replay
        step.out = step.out.detach()  # the autograd graph of the capture is not used again
        return step

    def _graph(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._arena.pool):
            work()
        return graph


def _nothing() -> None:
    raise AssertionError("not captured yet")


def _autocast(device: torch.device) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)


def fill_mask(mask: torch.Tensor, attended: torch.Tensor) -> None:
    """Causal attention to real tokens, in place.

    Args:
        mask: (rows, 1, length, length) bool.
        attended: (rows, shorter or equal length) 1 where a token is real; padding is on the right.
    """
    length = mask.shape[-1]
    real = torch.nn.functional.pad(attended.bool(), (0, length - attended.shape[1]))
    causal = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
    torch.logical_and(causal, real[:, None, None, :], out=mask)


def can_graph(model: torch.nn.Module) -> bool:
    """Whether every weight is trained or none, in layers that attend to the full length, without checkpointing."""
    config = getattr(model, "config", None)
    trained = {p.requires_grad for p in model.parameters()}
    return (
        attends_to_all(config)
        and len(trained) == 1
        and not getattr(model, "is_gradient_checkpointing", False)
        and getattr(config, "_attn_implementation", None) == "sdpa"
        and not hasattr(model, "peft_config")
    )


def graph_body(model: torch.nn.Module, arena: Arena, tell: Callable[[str], None] = print) -> None:
    """Let the model's body replay graphs where it can. tell: see GraphedBody."""
    if can_graph(model):
        body: Any = model.base_model
        body.forward = GraphedBody(body, arena, tell)


def release_graphs(model: torch.nn.Module) -> None:
    """Free the graphs of a model's body, if it has any."""
    forward = getattr(getattr(model, "base_model", None), "forward", None)
    if isinstance(forward, GraphedBody):
        forward.release()
