"""Token generation with a transformers model: prompts in, tokens and their log-probs out. Knows nothing of verl.

An own decode loop rather than `model.generate`, for three things PPO needs and `generate` does not give together:
the log-prob of each token taken on the spot (no logits of all steps kept), sampling settings a request, and rows that
leave the batch once they have ended, so that a batch costs what its rows cost and not its longest row times its size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import DynamicCache

# The batch is cut down to its unfinished rows when this share or less of it is left: each cut copies the cache.
SHRINK_AT = 0.75


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How one request is sampled. temperature 0 means greedy; top_k 0 or less and top_p 1 mean no filter."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One answer. `log_probs[i]` belongs to `token_ids[i]`; the stop token, where there is one, is the last."""

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: Literal["stop", "length"]


@dataclass(kw_only=True)
class _Settings:
    """The sampling settings of a batch as tensors, one entry a row."""

    temperature: torch.Tensor  # (rows, 1), 1 where greedy: the log-prob of a greedy token is the model's own
    greedy: torch.Tensor  # (rows,)
    top_p: torch.Tensor  # (rows, 1)
    top_k: torch.Tensor  # (rows, 1), vocabulary size where off
    limit: torch.Tensor  # (rows,) most new tokens
    filtered: bool  # whether any row uses top_p or top_k: sorting the vocabulary costs more than the model's head

    @classmethod
    def of(cls, sampling: Sequence[Sampling], vocabulary: int, device: torch.device) -> _Settings:
        def column(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        top_k = [s.top_k if s.top_k > 0 else vocabulary for s in sampling]
        return cls(
            temperature=column([s.temperature or 1.0 for s in sampling], torch.float32)[:, None],
            greedy=column([s.temperature == 0 for s in sampling], torch.bool),
            top_p=column([s.top_p for s in sampling], torch.float32)[:, None],
            top_k=column(top_k, torch.int64)[:, None],
            limit=column([s.max_new_tokens for s in sampling], torch.int64),
            filtered=any(s.temperature > 0 and (s.top_p < 1 or 0 < s.top_k < vocabulary) for s in sampling),
        )

    def rows(self, keep: torch.Tensor) -> _Settings:
        """The settings of the rows `keep`."""
        return _Settings(
            temperature=self.temperature[keep],
            greedy=self.greedy[keep],
            top_p=self.top_p[keep],
            top_k=self.top_k[keep],
            limit=self.limit[keep],
            filtered=self.filtered,
        )


def filter_logits(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Set to -inf what top-k, then top-p (nucleus, Holtzman et al. 2020) leave out; as vLLM orders and counts them.

    Args:
        logits: (rows, vocabulary), already divided by the temperature.
        top_k: (rows, 1), 1 or more.
        top_p: (rows, 1), in (0, 1].
    """
    ordered, index = logits.sort(dim=-1, descending=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    ordered = ordered.masked_fill(rank >= top_k, float("-inf"))
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities  # mass of the more likely tokens: the first one always stays
    # where top-p is off, rounding alone lifts the mass before the rarest tokens to 1
    ordered = ordered.masked_fill((before >= top_p) & (top_p < 1), float("-inf"))
    return torch.empty_like(ordered).scatter_(-1, index, ordered)


def sample_tokens(
    logits: torch.Tensor, settings: _Settings, generator: torch.Generator | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row and give its log-prob under the distribution it was drawn from.

    Args:
        logits: (rows, vocabulary), as the model gives them.

    Returns:
        tokens (rows,) int64 and log-probs (rows,) float32: after temperature and filters, which is what verl calls
        `processed_logprobs` (rollout.logprobs_mode).
    """
    scaled = logits.float() / settings.temperature
    if settings.filtered:
        kept = filter_logits(scaled, settings.top_k, settings.top_p)
        scaled = torch.where(settings.greedy[:, None], scaled, kept)
    log_probs = scaled.log_softmax(-1)
    # argmax of p / Exponential(1) is a draw from p, with no copy to the host
    noise = torch.empty_like(log_probs).exponential_(generator=generator)
    drawn = (log_probs.exp() / noise).argmax(-1)
    tokens = torch.where(settings.greedy, scaled.argmax(-1), drawn)
    return tokens, log_probs.gather(-1, tokens[:, None])[:, 0]


def left_pad(prompts: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts as (rows, longest) ids and mask, padded on the left."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    return ids, mask


def unique_prompts(prompts: Sequence[Sequence[int]]) -> tuple[list[Sequence[int]], list[int]]:
    """The different prompts, and for each row the index of its prompt: a group shares one prefill."""
    index: dict[tuple[int, ...], int] = {}
    rows = [index.setdefault(tuple(prompt), len(index)) for prompt in prompts]
    return list(index), rows


def seed_of(*numbers: int) -> int:
    """A seed for draws that belong to these numbers and to no others."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:7], "big")


class Generator:
    """Generates with one model. The model is used as it is: in evaluation mode, on its device, in its type.

    Args:
        model: a transformers causal language model.
        stop_token_ids: a row ends with the first of these, which stays in the answer.
        pad_token_id: any valid id; padded places are masked.
        seed: seeds the draws; the same calls in the same order give the same tokens.
        max_rows: most rows in one forward; more requests than that run in batches of like size, longest prompts first.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        stop_token_ids: Sequence[int],
        pad_token_id: int,
        seed: int,
        max_rows: int | None = None,
    ) -> None:
        self.model = model
        self.pad_token_id = pad_token_id
        self.max_rows = max_rows
        self.device = next(model.parameters()).device
        self._stop = torch.tensor(sorted(set(stop_token_ids)), dtype=torch.int64, device=self.device)
        self._seed = seed
        self._random = torch.Generator(device=self.device).manual_seed(seed)

    def begin(self, *numbers: int) -> None:
        """From here on the draws follow from the seed and these numbers, whatever was drawn before."""
        self._random.manual_seed(seed_of(self._seed, *numbers))

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[Sampling],
        on_tokens: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """One completion a prompt, in the order of the prompts.

        Args:
            prompts: token ids, at least one each; equal prompts are read once.
            sampling: one setting a prompt.
            on_tokens: told the number of new tokens after each step (a progress bar).
        """
        assert all(len(prompt) > 0 for prompt in prompts), "an empty prompt: there is nothing to attend to"
        if not prompts:
            return []
        batches = -(-len(prompts) // (self.max_rows or len(prompts)))
        size = -(-len(prompts) // batches)
        by_length = sorted(range(len(prompts)), key=lambda i: -len(prompts[i])) if batches > 1 else None
        order = by_length or list(range(len(prompts)))
        done: dict[int, Completion] = {}
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            batch = self._batch([prompts[i] for i in rows], [sampling[i] for i in rows], on_tokens, size)
            done.update(zip(rows, batch, strict=True))
        return [done[i] for i in range(len(prompts))]

    def _batch(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[Sampling],
        on_tokens: Callable[[int], None] | None,
        size: int,
    ) -> list[Completion]:
        """One batch. size: rows of all batches of this call but the last, which may have fewer."""
        logits, cache, mask = self._prefill(prompts)
        settings = _Settings.of(sampling, logits.shape[-1], self.device)
        tokens_of: list[list[int]] = [[] for _ in prompts]
        log_probs_of: list[list[float]] = [[] for _ in prompts]
        stopped = [False] * len(prompts)
        live = list(range(len(prompts)))  # which prompt each row of the batch belongs to
        ended = torch.zeros(len(prompts), dtype=torch.bool, device=self.device)
        for length in range(1, max(s.max_new_tokens for s in sampling) + 1):
            tokens, log_probs = sample_tokens(logits, settings, self._random)
            stop = torch.isin(tokens, self._stop)
            host = torch.stack([tokens.double(), log_probs.double(), ended.double(), stop.double()]).tolist()
            for owner, token, log_prob, was_over, stops in zip(live, *host, strict=True):
                if not was_over:
                    tokens_of[owner].append(int(token))
                    log_probs_of[owner].append(log_prob)
                    stopped[owner] = bool(stops)
            if on_tokens is not None:
                on_tokens(len(live) - int(sum(host[2])))
            ended = ended | stop | (length >= settings.limit)
            left = (~ended).nonzero()[:, 0]
            if len(left) == 0:
                break
            if len(left) <= SHRINK_AT * len(live):
                cache.batch_select_indices(left)
                settings, mask, tokens, ended = settings.rows(left), mask[left], tokens[left], ended[left]
                live = [live[i] for i in left.tolist()]
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            logits = self._forward(tokens[:, None], mask, mask.sum(1, keepdim=True) - 1, cache)
        return [
            Completion(token_ids=t, log_probs=p, finish_reason="stop" if s else "length")
            for t, p, s in zip(tokens_of, log_probs_of, stopped, strict=True)
        ]

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, DynamicCache, torch.Tensor]:
        different, owner = unique_prompts(prompts)
        ids, mask = left_pad(different, self.pad_token_id, self.device)
        cache = DynamicCache()
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = self._forward(ids, mask, positions, cache)
        if len(different) < len(prompts):
            rows = torch.tensor(owner, device=self.device)
            cache.batch_select_indices(rows)
            logits, mask = logits[rows], mask[rows]
        return logits, cache, mask

    def _forward(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: DynamicCache
    ) -> torch.Tensor:
        """Logits of the last place, (rows, vocabulary)."""
        out = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1]
