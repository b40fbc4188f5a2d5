"""What the settings of a run make of a model, as numbers: sequences, tokens, trained parameters, activations.

Pure functions under the memory plan (memory.py), whose text has the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass

from quickstart.arguments import CRITIC_TYPES, RunConfig
from quickstart.config import samples_per_step
from quickstart.doctor.parameters import ModelShape

FLOAT = 4  # bytes of a float32
ENGINE_ROWS = 256  # answers generated at a time (verl's rollout.max_num_seqs)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the settings make of a model: pure numbers."""

    shape: ModelShape
    critic_parameters: int
    reward_parameters: int
    compute: int  # bytes of the compute dtype
    rows: int  # sequences of one forward and backward
    prompt: int  # tokens of the longest prompt
    tokens: int  # of the longest sequence
    answers: int  # generated at a time
    trainable: int  # parameters of the policy that get gradients
    checkpointing: bool
    graphed: dict[str, int]  # role -> parameters of its body without the embedding: what graphs have gradients of


def lora_parameters(shape: ModelShape, rank: int) -> int:
    """Adapters on all linear layers of a decoder: rank x (in + out) each."""
    wide, inner = shape.heads * shape.head_dim, shape.intermediate
    narrow = shape.kv_heads * shape.head_dim
    return rank * shape.layers * (7 * shape.hidden + 2 * wide + 2 * narrow + 3 * inner)


def sizes_of(
    cfg: RunConfig, shape: ModelShape, critic: ModelShape | None, reward: int, longest_prompt: int | None
) -> Sizes:
    """The numbers behind the plan."""
    prompt = min(cfg.data.max_prompt_length, longest_prompt or cfg.data.max_prompt_length)
    per_row = 2 if cfg.rl.rl_type in ("dpo", "simpo", "orpo") else 1  # a pair is two sequences
    value = critic or shape
    body = value.body_parameters + value.hidden + 1
    return Sizes(
        shape=shape,
        critic_parameters=body if cfg.rl.rl_type in CRITIC_TYPES else 0,
        reward_parameters=reward,
        compute=4 if cfg.model.torch_dtype == "float32" else 2,
        rows=cfg.rl.per_device_train_batch_size * per_row,
        prompt=prompt,
        tokens=prompt + cfg.data.max_response_length,
        answers=min(samples_per_step(cfg), ENGINE_ROWS),
        trainable=lora_parameters(shape, cfg.model.lora_rank) if cfg.model.lora_rank else shape.parameters,
        checkpointing=bool(cfg.model.gradient_checkpointing),
        graphed={"actor": layer_parameters(shape), "critic": layer_parameters(value)},
    )


def layer_parameters(shape: ModelShape) -> int:
    """Without embedding and output head."""
    return max(shape.body_parameters - shape.vocabulary * shape.hidden, 0)


def activations(sizes: Sizes) -> int:
    """Bytes kept for one backward pass: see the module's text."""
    shape = sizes.shape
    wide = shape.heads * shape.head_dim
    if sizes.compute == FLOAT:
        layer = 24 * shape.hidden + 20 * wide + 16 * shape.intermediate
    else:
        layer = 20 * shape.hidden + 10 * wide + 8 * shape.intermediate
    spots = sizes.rows * sizes.tokens
    if sizes.checkpointing:
        return spots * (shape.layers * FLOAT * shape.hidden + layer)
    return spots * shape.layers * layer
