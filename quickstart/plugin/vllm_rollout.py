"""The `vllm` rollout engine behind verl's rollout interface: the requests of rollout.py, answered by vLLM.

verl's own vllm rollout is a server in processes of Ray's. This one is the engine in the trainer's process, which sleeps
while the trainer has the device (rollout.free_cache_engine): verl calls release, then resume of the weights, the
update, and resume of the cache (engine_workers.py:780-822).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from quickstart.plugin.engine import Completion, Sampling
from quickstart.plugin.retry import LOWER_ANSWERS, attempt, free_cached, out_of_memory
from quickstart.plugin.rollout import BatchingRollout, stop_token_ids
from quickstart.plugin.vllm_engine import VllmGenerator, cache_bytes


class VllmRollout(BatchingRollout):
    """vLLM in this process, given the actor's weights after every update. No second model is built."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, *_: Any, **__: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        model = self.model_config.hf_config
        wanted = self.config.max_model_len or self.config.prompt_length + self.config.response_length
        self.positions = min(wanted, self.positions)
        dtype = getattr(torch, self.config.dtype)
        free_cached()  # what the trainer's allocator keeps counts as taken
        free, total = torch.cuda.mem_get_info()
        needed = cache_bytes(model, self.config.max_num_seqs, self.positions, dtype.itemsize)
        cache = min(needed, int(free * self.config.gpu_memory_utilization))
        self._engine = VllmGenerator(
            self.model_config.local_path,
            dtype=self.config.dtype,
            positions=self.positions,
            stop_token_ids=stop_token_ids(self.model_config.tokenizer, self.model_config.generation_config),
            seed=self.config.seed,
            max_rows=self.config.max_num_seqs,
            cache=cache,
            share=max(cache / total, 0.01),
            eager=self.config.enforce_eager,
            trust_remote_code=self.model_config.trust_remote_code,
        )

    async def resume(self, tags: list[str]) -> None:
        """Take the device's memory again, for "weights" or "kv_cache"."""
        for tag in tags:
            self._engine.resume(tag)

    async def release(self) -> None:
        """Sleep, where the config says so (rollout.free_cache_engine)."""
        if self.config.free_cache_engine:
            self._engine.release()

    def _take(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._engine.load_weights(weights)
        self._generator = self._engine

    def _answers(self, prompts: list[list[int]], sampling: list[Sampling]) -> list[Completion]:
        """Of one batch. Its memory is taken when it wakes, so that less at a time would not help where it runs out."""
        generator = self._generating()
        answers, failed = attempt(lambda: generator.generate(prompts, sampling, self.on_tokens))
        if failed is not None:
            why = "vllm has taken its memory before, and does not run in halves"
            raise out_of_memory("generating answers", failed, why, f"{LOWER_ANSWERS}, or rl.rollout_engine=hf")
        return answers
