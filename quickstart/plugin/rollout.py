"""Rollouts in this process behind verl's interface: requests in, verl TokenOutput out; and the `hf` engine among them.

verl knows a rollout as two things: a BaseRollout (weights in, memory released and resumed) and a server with an async
`generate`. In one process one object is both. Requests that are waiting are generated together in one batch. What
engines share is in :class:`BatchingRollout`; the `vllm` engine is in vllm_rollout.py.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import TokenOutput

from quickstart.plugin.attention import never_plan
from quickstart.plugin.engine import Completion, Generator, Sampling
from quickstart.plugin.graph_engine import ATTENTION, GraphGenerator
from quickstart.plugin.lean_decode import join_projections
from quickstart.plugin.lean_layers import attends_to_all, make_lean
from quickstart.plugin.retry import LOWER_ANSWERS, attempt, free_cached, out_of_memory

# How long a batch waits for more requests when it is not known how many will come.
QUIET_SECONDS = 0.02


@dataclass(kw_only=True)
class _Request:
    prompt_ids: list[int]
    sampling: Sampling
    answer: asyncio.Future[Completion]


def stop_token_ids(tokenizer: Any, generation_config: Any) -> list[int]:
    """The tokens that end an answer: the tokenizer's eos and those of the model's generation config, as in vLLM."""
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    more = None if generation_config is None else generation_config.eos_token_id
    return ids + ([] if more is None else [more] if isinstance(more, int) else list(more))


def read_sampling(params: dict[str, Any], response_length: int, room: int) -> Sampling:
    """verl's sampling_params (agent_loop_tq.py:66-79) as ours; no answer may outgrow the model's positions."""
    assert room > 0, "the prompt fills all of the model's positions, there is none left for an answer"
    asked = params.get("max_tokens") or params.get("max_new_tokens") or response_length
    return Sampling(
        temperature=float(params.get("temperature", 1.0)),
        top_p=float(params.get("top_p", 1.0)),
        top_k=max(int(params.get("top_k", -1)), 0),
        max_new_tokens=min(asked, response_length, room),
    )


class BatchingRollout(BaseRollout):
    """Requests of an agent loop, put together to batches for one generator in this process.

    `expected` may be set to a call that says how many requests are on their way; a batch then starts the moment that
    all of them wait.
    """

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, *_: Any, **__: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        self.expected: Callable[[], int] | None = None
        self.on_tokens: Callable[[int], None] | None = None
        self.tell: Callable[[str], None] = print
        self.global_steps: int | None = None
        self.positions = int(self.model_config.hf_config.max_position_embeddings)  # of prompt and answer together
        self._generator: Any = None  # a Generator or VllmGenerator, from the first weights on
        self._drawing_for: tuple[int, ...] = ()
        self._waiting: list[_Request] = []
        self._timer: asyncio.TimerHandle | None = None

    def _take(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Make these the weights that answers come from; the first time, set the generator."""
        raise NotImplementedError

    def _answers(self, prompts: list[list[int]], sampling: list[Sampling]) -> list[Completion]:
        """Of one batch."""
        raise NotImplementedError

    def _generating(self) -> Any:
        assert self._generator is not None, "no weights yet: update_weights comes before the first rollout"
        return self._generator

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **_: Any,
    ) -> None:
        """The actor's weights, name by name; every parameter must be named.

        The name check is ours because a missing one would go unseen: verl sends LoRA adapters apart from the base
        weights unless model.lora.merge is set (engine_workers.py:767-790).
        """
        assert wire_format == "named_tensors", wire_format
        self._take(weights)
        self.global_steps = global_steps

    def begin(self, *numbers: int) -> None:
        """What is generated next belongs to this step and purpose: draws depend on nothing that came before.

        A resumed run therefore gets the answers of an undisturbed one, and an evaluation in between changes none.
        """
        generator = self._generating()
        if numbers != self._drawing_for:
            generator.begin(*numbers)
            self._drawing_for = numbers

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **media: Any
    ) -> TokenOutput:
        """One request, as verl's agent loop makes it (workers/rollout/llm_server.py:99).

        Returns:
            TokenOutput with token_ids, their processed log_probs, stop_reason "completed", and in extra_fields the
            weight version (global_steps) and the finish reason ("stop" or "length").
        """
        assert not any(media.get(kind) for kind in ("image_data", "video_data", "audio_data")), "text models only"
        room = self.positions - len(prompt_ids)
        sampling = read_sampling(sampling_params, self.config.response_length, room)
        request = _Request(prompt_ids=prompt_ids, sampling=sampling, answer=asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self._schedule()
        answer = await request.answer
        steps = self.global_steps
        return TokenOutput(
            token_ids=answer.token_ids,
            log_probs=answer.log_probs,
            stop_reason="completed",
            extra_fields={
                "global_steps": steps,
                "min_global_steps": steps,
                "max_global_steps": steps,
                "finish_reason": answer.finish_reason,
            },
        )

    def _schedule(self) -> None:
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
        all_here = self.expected is not None and len(self._waiting) >= self.expected()
        self._timer = loop.call_later(0 if all_here else QUIET_SECONDS, self._run_batch)

    def _run_batch(self) -> None:
        batch, self._waiting, self._timer = self._waiting, [], None
        try:
            answers = self._answers([r.prompt_ids for r in batch], [r.sampling for r in batch])
        except Exception as error:  # belongs to those who wait, not to the event loop
            for request in batch:
                request.answer.set_exception(error)
            return
        for request, answer in zip(batch, answers, strict=True):
            request.answer.set_result(answer)


class LocalRollout(BatchingRollout):
    """A transformers model in this process, given the actor's weights after every update.

    Built empty: the weights come from the actor before the first rollout, so the checkpoint is read only once.
    """

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, *_: Any, **__: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        self._halved = False
        self._device = torch.device(device_mesh.device_type)
        self._dtype = getattr(torch, self.config.dtype)
        # drawing numbers for parameters without memory takes half a second; a model with code of its own may fill
        # buffers with the functions that are then left out
        drawn = nullcontext() if self.model_config.trust_remote_code else no_init_weights()
        with drawn, init_empty_weights(include_buffers=False):
            self.model = AutoModelForCausalLM.from_config(
                self._own_config(),
                dtype=self._dtype,
                trust_remote_code=self.model_config.trust_remote_code,
            ).eval()
        if self._device.type == "cuda":
            never_plan(self.model)
            make_lean(self.model)

    def _own_config(self) -> Any:
        """The model's configuration with this engine's attention; a copy, since the actor reads the same object."""
        config = copy.deepcopy(self.model_config.hf_config)
        if self._uses_graphs():
            config._attn_implementation = ATTENTION
        return config

    def _uses_graphs(self) -> bool:
        """Graphs need a CUDA device and layers that attend to the full length."""
        attends = attends_to_all(self.model_config.hf_config)
        return self._device.type == "cuda" and attends and not self.config.enforce_eager

    async def resume(self, tags: list[str]) -> None:
        """Nothing to do: the weights stay, and a cache is made when a batch needs it."""

    async def release(self) -> None:
        """Free the cache of the last batch where the config says so (rollout.free_cache_engine)."""
        if self.config.free_cache_engine and isinstance(self._generator, GraphGenerator):
            self._generator.release()

    def _take(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        if self._generator is None:
            self._adopt(weights)
        else:
            self._copy(weights)

    def _adopt(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """First weights: become the parameters of the empty model.

        Where device and type are the actor's (a CPU in float32), they are the actor's own tensors and not a copy: a
        quarter less memory, and later updates cost nothing. Nothing generates while the actor is being updated.
        """
        state = {
            name: value.detach().to(self._device, self._dtype) for name, value in weights if name not in self._tied()
        }
        self._check_names(set(state))
        self.model.load_state_dict(state, strict=False, assign=True)
        self.model.tie_weights()
        self.model.to(self._device)
        self.model.requires_grad_(False)
        self._generator = self._new_generator()

    def _new_generator(self) -> Generator:
        options = {
            "stop_token_ids": stop_token_ids(self.model_config.tokenizer, self.model_config.generation_config),
            "pad_token_id": self.model_config.tokenizer.pad_token_id,
            "seed": self.config.seed,
            "max_rows": self.config.max_num_seqs,
        }
        if not self._uses_graphs():
            return Generator(self.model, **options)
        # in float32 the weights are the actor's own tensors, which must stay where they are
        lean = self._dtype != torch.float32 and join_projections(self.model)
        return GraphGenerator(self.model, lean=lean, **options)

    @torch.no_grad()
    def _copy(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        seen = set()
        for name, value in weights:
            if name not in self._tied():
                assert name in own, f"unknown {name}"
                if own[name].data_ptr() != value.data_ptr():
                    own[name].copy_(value.detach())
                seen.add(name)
        self._check_names(seen)

    def _tied(self) -> set[str]:
        """Names that verl sends although they are another parameter (lm_head of a model with tied embeddings)."""
        if not self.model_config.hf_config.tie_word_embeddings:
            return set()
        keys = self.model._tied_weights_keys
        return set(keys) if keys else set()

    def _check_names(self, given: set[str]) -> None:
        wanted = {name for name in self.model.state_dict() if name not in self._tied()}
        assert given == wanted, f"missing {sorted(wanted - given)[:3]}, unknown {sorted(given - wanted)[:3]}"

    def _answers(self, prompts: list[list[int]], sampling: list[Sampling]) -> list[Completion]:
        """Of one batch. Where memory runs out, once a run, in halves: other draws, from the same distribution."""
        generator = self._generating()
        answers, failed = attempt(lambda: generator.generate(prompts, sampling, self.on_tokens))
        if failed is None:
            return answers
        rows = min(generator.max_rows or len(prompts), len(prompts))
        if self._halved or rows == 1:
            why = "answers were halved before" if self._halved else "one answer at a time cannot be halved"
            raise out_of_memory("generating answers", failed, why, LOWER_ANSWERS)
        self._halved, generator.max_rows = True, rows // 2
        if isinstance(generator, GraphGenerator):
            generator.release()
        free_cached()
        generator.begin(*self._drawing_for)
        self.tell(
            f"Warning: out of memory while generating answers{failed}. They are drawn again, and the run goes on at "
            f"{rows // 2} instead of {rows} answers at a time (rollout.max_num_seqs)"
        )
        answers, failed = attempt(lambda: generator.generate(prompts, sampling, self.on_tokens))
        if failed is not None:
            raise out_of_memory("generating answers", failed, "half of them do not fit either", LOWER_ANSWERS)
        return answers
