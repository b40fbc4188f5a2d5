"""Models, tokenizer and rows for tests: made in a moment, without a hub, the same bits on every machine.

Weights are drawn by numpy's integer generator and scaled, not by torch's normal distribution, whose last bits depend
on the processor. Not here: anything that a model has learned.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Kind = Literal["qwen2_tied", "qwen2", "llama"]
VOCABULARY = 264  # 258 tokens and a few places that no token has, as in published models
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def make_tokenizer() -> Any:
    """Byte-level BPE without merges: a token is a byte, so that lengths can be counted by hand."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=258, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    return tokenizer


def fill_weights(model: Any, seed: int) -> None:
    """Matrices uniform with a spread that gives lively logits, biases small, norms one. Same bits everywhere."""
    import numpy as np
    import torch

    random = np.random.Generator(np.random.PCG64(seed))
    for name, parameter in sorted(model.named_parameters()):
        if "norm" in name:
            continue
        half_width = 0.4 if "embed" in name or "lm_head" in name else 0.2 if parameter.dim() > 1 else 0.05
        values = (random.integers(0, 2**24, size=tuple(parameter.shape)) / 2**23 - 1) * half_width
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(values))


def _config(kind: Kind, eos: int, **changes: Any) -> Any:
    from transformers import LlamaConfig, Qwen2Config

    config = LlamaConfig if kind == "llama" else Qwen2Config
    tied = kind == "qwen2_tied"
    return config(**SHAPE | changes, tie_word_embeddings=tied, eos_token_id=eos, bos_token_id=None, pad_token_id=eos)


def save_policy(folder: Path, kind: Kind = "qwen2_tied", seed: int = 1, **changes: Any) -> Path:
    """A causal language model with its tokenizer, as a folder for from_pretrained. `changes` go to its config."""
    from transformers import LlamaForCausalLM, Qwen2ForCausalLM

    tokenizer = make_tokenizer()
    model_class = LlamaForCausalLM if kind == "llama" else Qwen2ForCausalLM
    model = model_class(_config(kind, tokenizer.eos_token_id, **changes))
    fill_weights(model, seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_critic(folder: Path, seed: int = 2) -> Path:
    """A value model whose head is part of the checkpoint, so that two runs start from the same one."""
    from transformers import Qwen2ForTokenClassification

    tokenizer = make_tokenizer()
    config = _config("qwen2", tokenizer.eos_token_id)
    config.num_labels = 1
    model = Qwen2ForTokenClassification(config)
    fill_weights(model, seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def weights_sha256(folder: Path) -> str:
    """Hash over names and bytes of all weights of a folder."""
    from safetensors.numpy import load_file

    digest = hashlib.sha256()
    for name, value in sorted(load_file(folder / "model.safetensors").items()):
        digest.update(name.encode())
        digest.update(value.tobytes())
    return digest.hexdigest()


def arithmetic_rows(count: int) -> list[dict[str, str]]:
    """Sums in the shape of the sample data: {prompt, chosen, rejected}; prompts of different lengths, no two alike."""
    pairs = [(i, (7 * i) % 23) for i in range(count)]
    return [{"prompt": f"Say {a} plus {b}", "chosen": str(a + b), "rejected": str(a - b)} for a, b in pairs]


def save_rows(path: Path, rows: list[dict[str, str]]) -> Path:
    """Rows as the parquet file that verl reads."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = [
        {
            "data_source": "tiny",
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "ability": "tiny",
            "reward_model": {"style": "rule", "ground_truth": row["chosen"]},
            "extra_info": {"index": i, "chosen": row["chosen"], "rejected": row["rejected"]},
        }
        for i, row in enumerate(rows)
    ]
    pq.write_table(pa.Table.from_pylist(table), path)
    return path
