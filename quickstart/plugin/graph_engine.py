"""Generation on a CUDA device with one captured graph a step: the whole decode step replayed without the host.

With a dynamic cache a step of a small model is bound by its kernel launches (17 ms a step for 0.5B on an H200, of which
the device works 2 ms). Here the cache has its full size from the start, so that every step has the same shapes; one
step (model, sampling, bookkeeping) is captured once and replayed. Nothing is compiled: the first batch costs seconds
less than with torch.compile. Results are those of :class:`quickstart.plugin.engine.Generator` up to the order of draws.

On a CPU the same code runs without a graph, which is how the tests reach it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, DynamicCache
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from quickstart.plugin.engine import Completion, Generator, Sampling, _Settings, left_pad, sample_tokens, unique_prompts
from quickstart.plugin.lean_decode import DecodeCache, grouped_attention
from quickstart.plugin.lean_layers import attends_to_all

ATTENTION = "quickstart_grouped"
# How many steps are replayed between two looks at whether every row has ended (a look waits for the device).
LOOK_EVERY = 16
CACHE_STEP = 64  # cache lengths are rounded up to this, so that batches of like size share a graph


AttentionInterface.register(ATTENTION, grouped_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def can_replay(model: torch.nn.Module) -> bool:
    """Whether a model that is also trained can generate with a GraphGenerator as it is."""
    config: Any = model.config
    device = next(model.parameters()).device.type
    return device == "cuda" and attends_to_all(config) and config._attn_implementation == "sdpa"


@dataclass(kw_only=True)
class _Step:
    """Everything that one decode step reads and writes; addresses stay, contents change."""

    cache: DecodeCache
    tokens: torch.Tensor  # (rows, 1) the tokens to be read next
    positions: torch.Tensor  # (rows, 1) their positions
    mask: torch.Tensor  # (rows, 1, 1, length) 0 where attended, -inf elsewhere: what the kernels want of a bool mask
    column: torch.Tensor  # (1,) where the next token lies in the cache
    index: torch.Tensor  # (1,) number of the next answer token
    answers: torch.Tensor  # (rows, new) tokens
    log_probs: torch.Tensor  # (rows, new)
    ended: torch.Tensor  # (rows,) bool
    lengths: torch.Tensor  # (rows,) tokens of each answer
    stopped: torch.Tensor  # (rows,) bool, ended by a stop token
    settings: _Settings
    graph: Any = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(rows, cache length, new tokens)."""
        return self.tokens.shape[0], self.mask.shape[-1], self.answers.shape[1]


class GraphGenerator(Generator):
    """As Generator, on one device with fixed shapes. Takes models whose layers all attend to the full length.

    Args:
        lean: whether the model decodes by lean_decode.join_projections.
    """

    def __init__(self, model: torch.nn.Module, *, lean: bool = False, **kwargs: Any) -> None:
        super().__init__(model, **kwargs)
        self._lean = lean
        self._step: _Step | None = None

    def release(self) -> None:
        """Free the cache and the graph; the next batch makes them again."""
        self._step = None

    def _batch(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[Sampling],
        on_tokens: Callable[[int], None] | None,
        size: int,
    ) -> list[Completion]:
        """One batch, filled up to `size` rows by some that have ended: the graph of the batch before serves it."""
        new = max(s.max_new_tokens for s in sampling)
        ids, mask, owner = self._padded(prompts)
        spare = size - len(prompts)
        owner = torch.cat([owner, owner[-1:].expand(spare)])
        step = self._step_for(size, ids.shape[1] + new, new, [*sampling, *[sampling[-1]] * spare])
        self._prefill_into(step, ids, mask, owner, spare)
        for done in range(1, new):
            self._replay(step)
            if done % LOOK_EVERY == 0:
                if on_tokens is not None:
                    on_tokens(LOOK_EVERY * len(prompts))
                if bool(step.ended.all()):
                    break
        return self._completions(step)[: len(prompts)]

    def _padded(self, prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        different, owner = unique_prompts(prompts)
        ids, mask = left_pad(different, self.pad_token_id, self.device)
        return ids, mask, torch.tensor(owner, device=self.device)

    def _step_for(self, rows: int, length: int, new: int, sampling: Sequence[Sampling]) -> _Step:
        """The step of the last batch where its shapes fit, else a new one."""
        length = -(-length // CACHE_STEP) * CACHE_STEP
        settings = _Settings.of(sampling, self.model.config.vocab_size, self.device)
        old = self._step
        if old is not None and old.shape == (rows, length, new) and old.settings.filtered == settings.filtered:
            for name in ("temperature", "greedy", "top_p", "top_k", "limit"):
                getattr(old.settings, name).copy_(getattr(settings, name))
            return old
        self._step = None  # free the old one first
        self._step = self._new_step(rows, length, new, settings)
        return self._step

    def _new_step(self, rows: int, length: int, new: int, settings: _Settings) -> _Step:
        def full(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        column = full(1)
        return _Step(
            cache=DecodeCache(column=column, lean=self._lean, config=self.model.config, max_cache_len=length),
            tokens=full(rows, 1),
            positions=full(rows, 1),
            mask=full(rows, 1, 1, length, dtype=self.model.dtype),
            column=column,
            index=full(1),
            answers=full(rows, new),
            log_probs=full(rows, new, dtype=torch.float32),
            ended=full(rows, dtype=torch.bool),
            lengths=full(rows),
            stopped=full(rows, dtype=torch.bool),
            settings=settings,
        )

    def _prefill_into(
        self, step: _Step, ids: torch.Tensor, mask: torch.Tensor, owner: torch.Tensor, spare: int
    ) -> None:
        """Read the prompts, fill the cache, draw the first token. The last `spare` rows have ended."""
        width = ids.shape[1]
        prompts = DynamicCache()
        logits = self._forward(ids, mask, (mask.cumsum(1) - 1).clamp(min=0), prompts)
        self._fill_cache(step, prompts, owner, width)
        mask = mask[owner]
        step.mask.fill_(float("-inf"))
        step.mask[:, 0, 0, :width].masked_fill_(mask.bool(), 0.0)
        step.positions.copy_(mask.sum(1, keepdim=True) - 1)
        step.column.fill_(width)
        step.index.zero_()
        for buffer in (step.ended, step.lengths, step.stopped):
            buffer.zero_()
        step.ended[len(owner) - spare :] = True
        self._take(step, logits[owner])

    def _fill_cache(self, step: _Step, prompts: Any, owner: torch.Tensor, width: int) -> None:
        for source, target in zip(prompts.layers, step.cache.layers, strict=True):
            keys, values = source.keys[owner], source.values[owner]
            if not target.is_initialized:
                target.lazy_initialization(keys, values)
            target.keys[:, :, :width].copy_(keys)
            target.values[:, :, :width].copy_(values)
            target.cumulative_length.fill_(width)

    def _take(self, step: _Step, logits: torch.Tensor) -> None:
        """Draw a token a row and write it down; all in place, so that it can be part of a graph."""
        tokens, log_probs = sample_tokens(logits, step.settings, self._random)
        live = ~step.ended
        step.answers.index_copy_(1, step.index, tokens[:, None])
        step.log_probs.index_copy_(1, step.index, log_probs[:, None])
        step.lengths.add_(live)
        stop = torch.isin(tokens, self._stop) & live
        step.stopped.logical_or_(stop)
        step.index.add_(1)
        step.ended.logical_or_(stop | (step.index >= step.settings.limit))
        step.tokens.copy_(tokens[:, None])
        step.positions.add_(1)

    def _decode(self, step: _Step) -> None:
        step.mask.index_fill_(3, step.column, 0.0)
        out = self.model(
            input_ids=step.tokens,
            attention_mask=step.mask,
            position_ids=step.positions,
            past_key_values=step.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        step.column.add_(1)
        self._take(step, out.logits[:, -1])

    def _replay(self, step: _Step) -> None:
        if self.device.type != "cuda":
            self._decode(step)
        elif step.graph is None:
            self._capture(step)
        else:
            step.graph.replay()

    def _capture(self, step: _Step) -> None:
        """The first step runs as it is (kernels load, workspaces are made), the second is captured and replayed.

        Capturing does not run the step, so the state after this call is that of one step.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._decode(step)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self._random)
        with torch.cuda.graph(graph):
            self._decode(step)
        step.graph = graph

    def _completions(self, step: _Step) -> list[Completion]:
        lengths, stopped = step.lengths.tolist(), step.stopped.tolist()
        answers, log_probs = step.answers.tolist(), step.log_probs.tolist()
        return [
            Completion(token_ids=tokens[:n], log_probs=scores[:n], finish_reason="stop" if stop else "length")
            for tokens, scores, n, stop in zip(answers, log_probs, lengths, stopped, strict=True)
        ]
