"""TRL's side of bench_gpu.py: DPO or GRPO on the benchmark's rows and model, a line after each step.

    PYTHONPATH=... python scripts/bench_gpu_trl.py dpo 5 /tmp/bench

A bare script, as TRL's own examples: sdpa, float32 weights with bf16 autocast, no vLLM, no gradient checkpointing,
micro batches of 20, five to an update. Of the 100 answers of a GRPO step that is one update, where ours makes five of
20 (the baseline's settings); TRL has no PPO.
"""

from __future__ import annotations

import json
import runpy
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from bench_gpu_work import NEW_TOKENS, UPDATE
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback


class Told(TrainerCallback):
    """Prints a line when a step is done on the device."""

    def __init__(self) -> None:
        self.last: float | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Of transformers."""
        torch.cuda.synchronize()
        now = time.monotonic()
        seconds = "" if self.last is None else f" {now - self.last:.3f}"
        print(f"STEP {state.global_step}{seconds}", flush=True)
        self.last = now


def train(method: str, steps: int, folder: Path, output: str) -> None:
    """Train; rows, model and reward are those of make_inputs, output a folder that may go."""
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    user = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    model, tokenizer = str(folder / "model"), AutoTokenizer.from_pretrained(folder / "model")
    settings: dict[str, Any] = {
        "output_dir": output,
        "learning_rate": 1e-6,
        "bf16": True,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "max_steps": steps,
        "disable_tqdm": True,
        "per_device_train_batch_size": UPDATE,
        "gradient_accumulation_steps": 5,
        "model_init_kwargs": {"dtype": "float32", "attn_implementation": "sdpa"},
    }
    if method == "dpo":
        from trl import DPOConfig, DPOTrainer

        def answers(name: str) -> list[list[dict[str, str]]]:
            return [[{"role": "assistant", "content": row[name]}] for row in rows]

        table = {"prompt": user, "chosen": answers("chosen"), "rejected": answers("rejected")}
        trainer: Any = DPOTrainer(
            model=model,
            args=DPOConfig(max_length=256 + NEW_TOKENS, **settings),
            train_dataset=Dataset.from_dict(table),
            processing_class=tokenizer,
            callbacks=[Told()],
        )
    else:
        from trl import GRPOConfig, GRPOTrainer

        score = runpy.run_path(str(folder / "reward.py"))["compute_score"]

        def reward(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
            return [score("bench", messages[0]["content"], None) for messages in completions]

        more = {"num_generations": 4, "generation_batch_size": 100, "beta": 0.04, "use_vllm": False}
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=GRPOConfig(max_completion_length=NEW_TOKENS, temperature=1.0, **more, **settings),
            train_dataset=Dataset.from_dict({"prompt": user}),
            processing_class=tokenizer,
            callbacks=[Told()],
        )
    trainer.train()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        train(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), scratch)
