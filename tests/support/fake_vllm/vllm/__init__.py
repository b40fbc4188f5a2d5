"""In vllm's place on a machine without a GPU: the calls that our engine makes, with vllm 0.24's names and refusals.

No model: tokens follow from torch's generator, or from the prompt where it is greedy. What is held is the order of
calls (asleep, awake, weights), the names of weights, and the settings of requests. Log-probs are -token / 100 for the
token that was drawn, beside one of -9 for another.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

__version__ = "0.24.0"

JOINED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
LAYER = (
    "self_attn.qkv_proj.weight",
    "self_attn.qkv_proj.bias",
    "self_attn.o_proj.weight",
    "mlp.gate_up_proj.weight",
    "mlp.down_proj.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
)


@dataclass(kw_only=True)
class SamplingParams:
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    stop_token_ids: list[int]
    logprobs: int
    detokenize: bool

    def __post_init__(self) -> None:
        if self.temperature > 2:
            raise ValueError(f"temperature must be in [0, 2], got {self.temperature}.")


class Model:
    """Qwen2 by the names of vLLM's class."""

    packed_modules_mapping = JOINED

    def __init__(self, config: dict[str, Any]) -> None:
        self.tied = config["tie_word_embeddings"]
        layers = [f"model.layers.{i}.{name}" for i in range(config["num_hidden_layers"]) for name in LAYER]
        self.names = ["model.embed_tokens.weight", *layers, "model.norm.weight"]
        self.names += [] if self.tied else ["lm_head.weight"]
        self.got: dict[str, Any] = {}

    def named_parameters(self) -> list[tuple[str, None]]:
        return [(name, None) for name in self.names]

    def load_weights(self, weights: Any) -> set[str]:
        loaded = set()
        for name, value in weights:
            if self.tied and name.startswith("lm_head."):
                continue
            whole = self.joined(name)
            if whole not in self.names and name.startswith("model."):
                continue  # as vllm's Qwen2Model
            if whole not in self.names:
                raise ValueError(f"There is no module or parameter named {name!r} in Qwen2ForCausalLM.")
            assert not value.requires_grad
            self.got[name] = value
            loaded.add(whole)
        return loaded

    def joined(self, name: str) -> str:
        for whole, parts in JOINED.items():
            for part in parts:
                name = name.replace(f".{part}.", f".{whole}.")
        return name


class LLM:
    made: ClassVar[list[LLM]] = []  # every engine of this process

    def __init__(self, **settings: Any) -> None:
        if os.environ.get("FAKE_VLLM_REFUSES"):
            raise ValueError("1 validation error for ModelConfig\n  Value error, no such architecture")
        self.settings = settings
        self.variables = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
        self.model = Model(json.loads((Path(settings["model"]) / "config.json").read_text(encoding="utf-8")))
        self.calls: list[tuple[Any, ...]] = []
        self.requests: list[SamplingParams] = []
        self.awake = {"weights", "kv_cache"}
        LLM.made.append(self)

    def apply_model(self, function: Any) -> list[Any]:
        assert "weights" in self.awake
        self.calls.append(("apply",))
        return [function(self.model)]

    def sleep(self, level: int = 1) -> None:
        assert self.awake == {"weights", "kv_cache"}
        self.calls.append(("sleep", level))
        self.awake = set()

    def wake_up(self, tags: list[str]) -> None:
        assert not self.awake & set(tags)
        self.calls.append(("wake", *tags))
        self.awake |= set(tags)

    def generate(self, prompts: list[dict[str, Any]], params: list[SamplingParams], *, use_tqdm: bool) -> list[Any]:
        assert self.awake == {"weights", "kv_cache"}
        assert not use_tqdm
        self.requests += params
        pairs = zip(prompts, params, strict=True)
        return [SimpleNamespace(outputs=[answer(prompt["prompt_token_ids"], one)]) for prompt, one in pairs]


def answer(prompt: list[int], params: SamplingParams) -> Any:
    draw = random.Random(repr(prompt) if params.temperature == 0 else int(torch.randint(1 << 40, ())))
    tokens: list[int] = []
    reason = "length"
    while len(tokens) < params.max_tokens and reason == "length":
        tokens.append(draw.randrange(2, 250))
        reason = "stop" if tokens[-1] in params.stop_token_ids else "length"
    places = [{255: SimpleNamespace(logprob=-9.0), token: SimpleNamespace(logprob=-token / 100)} for token in tokens]
    return SimpleNamespace(token_ids=tuple(tokens), logprobs=places, finish_reason=reason)
