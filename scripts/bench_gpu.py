"""Ours beside stock verl on one GPU: the same work, one run of the script, one table.

    python scripts/bench_gpu.py --out /tmp/bench                      # ours: ppo, grpo, dpo, kto
    python scripts/bench_gpu.py --out /tmp/bench --stock              # stock verl's PPO with vLLM first (5 minutes)

Work: a model of Qwen2-0.5B's shape with random weights, 100 prompts, 128 new tokens, updates of 20 samples, bf16
compute with float32 master weights, a rule as reward. Random weights tell nothing about learning; time and memory are
those of trained ones. Times are wall-clock from the start of each command; "later step" is the median of the steps
after the first; memory is the peak that nvidia-smi shows. Not here: learning, which tests and README show on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

PROMPTS, NEW_TOKENS, UPDATE = 100, 128, 20
METHODS = ("ppo", "grpo", "dpo", "kto")
REWARD = """def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return min(1.0, sum(character.isdigit() for character in solution_str) / 8)
"""
PHASES = ("gen", "old_log_prob", "ref", "values", "update_critic", "update_actor", "update_weights")


@dataclass(kw_only=True)
class Measured:
    """One command's figures."""

    name: str
    first_update: float | None = None  # seconds from the start of the command
    steps: list[float] = field(default_factory=list)  # seconds of each step
    phases: dict[str, float] = field(default_factory=dict)  # median seconds in later steps
    peak_mib: int = 0
    total: float = 0.0
    exit_code: int | None = None

    def row(self) -> str:
        """One line of the table."""
        later = f"{statistics.median(self.steps[1:]):.2f}" if len(self.steps) > 1 else "-"
        first = "-" if self.first_update is None else f"{self.first_update:.1f}"
        parts = " ".join(f"{name} {seconds:.2f}" for name, seconds in self.phases.items())
        return f"| {self.name} | {first} | {later} | {self.peak_mib / 1024:.1f} | {self.total:.0f} | {parts} |"


def make_inputs(folder: Path) -> None:
    """Model, rows and reward under `folder`; nothing where they are already."""
    import random

    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    if (folder / "rows.jsonl").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    dice = random.Random(0)
    torch.manual_seed(0)
    sums = [(dice.randint(0, 20), dice.randint(1, 20)) for _ in range(PROMPTS)]  # a pair must not be equal
    question = "Say {} plus {}, and explain how the digits add up in a short paragraph. Task number {}."
    rows = [
        {"prompt": question.format(a, b, i), "chosen": f"{a + b} " * 40, "rejected": f"{a - b} " * 40}
        for i, (a, b) in enumerate(sums)
    ]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    bpe.train_from_iterator([json.dumps(row) for row in rows], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=special[2], pad_token=special[0])
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer.save_pretrained(folder / "model")
    shape = Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
    )
    Qwen2ForCausalLM(shape).to(torch.bfloat16).save_pretrained(folder / "model")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    write_parquet(folder / "train.parquet", rows)
    text = "\n".join(json.dumps(row) for row in rows)
    (folder / "rows.jsonl").write_text(text + "\n", encoding="utf-8")


def write_parquet(path: Path, rows: list[dict[str, str]]) -> None:
    """The rows in verl's own format, for the stock trainer."""
    from datasets import Dataset

    Dataset.from_list(
        [
            {
                "data_source": "bench",
                "prompt": [{"role": "user", "content": row["prompt"]}],
                "ability": "chat",
                "reward_model": {"style": "rule", "ground_truth": row["chosen"]},
                "extra_info": {"index": index},
            }
            for index, row in enumerate(rows)
        ]
    ).to_parquet(path)


def our_command(folder: Path, method: str, steps: int, output: Path, extra: list[str]) -> list[str]:
    """`python -m quickstart.run` with the work of this benchmark."""
    batch = {"ppo": (PROMPTS, 1), "grpo": (PROMPTS // 4, 4)}.get(method)
    rollout = [f"rl.rollout_batch_size={batch[0]}", f"rl.num_generations={batch[1]}"] if batch else []
    return [
        *(sys.executable, "-m", "quickstart.run", "profile=gpu"),
        f"model.model_name_or_path={folder / 'model'}",
        f"data.train_file={folder / 'rows.jsonl'}",
        *("data.max_prompt_length=256", f"data.max_response_length={NEW_TOKENS}", "data.overlong=truncate"),
        *(f"rl.rl_type={method}", f"rl.reward=function:{folder / 'reward.py'}:compute_score", *rollout),
        *(f"rl.per_device_train_batch_size={UPDATE}", f"rl.gradient_accumulation_steps={1 if batch else 5}"),
        *(f"training.max_steps={steps}", "training.save_steps=never", f"training.output_dir={output}", *extra),
    ]


def stock_command(folder: Path, steps: int) -> list[str]:
    """verl's own main_ppo with its vLLM rollout, and what it needs to run on one device without flash-attn."""
    actor = "actor_rollout_ref"
    sdpa = "override_config.attn_implementation=sdpa"
    micro = UPDATE
    return [
        *(sys.executable, "-m", "verl.trainer.main_ppo"),
        *(f"data.train_files={folder}/train.parquet", f"data.val_files={folder}/train.parquet"),
        *(f"data.train_batch_size={PROMPTS}", "data.max_prompt_length=256", f"data.max_response_length={NEW_TOKENS}"),
        "data.dataloader_num_workers=0",
        *(f"{actor}.model.path={folder}/model", f"{actor}.model.use_remove_padding=False", f"+{actor}.model.{sdpa}"),
        *(f"critic.model.path={folder}/model", "critic.model.use_remove_padding=False", f"+critic.model.{sdpa}"),
        *(f"{actor}.actor.ppo_mini_batch_size={UPDATE}", f"{actor}.actor.ppo_micro_batch_size_per_gpu={micro}"),
        *(f"critic.ppo_micro_batch_size_per_gpu={micro}", f"{actor}.rollout.log_prob_micro_batch_size_per_gpu={micro}"),
        *(f"{actor}.ref.log_prob_micro_batch_size_per_gpu={micro}", f"{actor}.rollout.name=vllm"),
        *(f"{actor}.rollout.tensor_model_parallel_size=1", f"{actor}.rollout.gpu_memory_utilization=0.3"),
        *("algorithm.use_kl_in_reward=True", "algorithm.adv_estimator=gae"),
        f"reward.custom_reward_function.path={folder}/reward.py",
        *("trainer.n_gpus_per_node=1", "trainer.nnodes=1", f"trainer.total_training_steps={steps}"),
        *("trainer.total_epochs=10", "trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.save_freq=-1"),
        *("+ray_kwargs.ray_init.include_dashboard=False", 'trainer.logger=["console"]'),
    ]


def value_head_file(folder: Path) -> Path:
    """A module that lets stock verl's critic load without flash-attn (verl/utils/model.py:649 asks for it)."""
    path = folder / "bench_value_head.py"
    path.write_text(
        "import verl.utils.model as model\n"
        "from quickstart.plugin.shims import load_value_head_model\n"
        "model.load_valuehead_model = load_value_head_model\n",
        encoding="utf-8",
    )
    return path


def measure(
    name: str, command: list[str], log: Path, progress: Callable[[], int], environment: dict[str, str], limit: float
) -> Measured:
    """Run a command; note when its first step is done, and the largest memory that nvidia-smi shows meanwhile."""
    result = Measured(name=name)
    started = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | environment)
        over = threading.Event()
        watcher = threading.Thread(target=_watch_memory, args=(result, over), daemon=True)
        watcher.start()
        while process.poll() is None and time.monotonic() - started < limit:
            if result.first_update is None and progress() > 0:
                result.first_update = time.monotonic() - started
            time.sleep(0.05)
        if process.poll() is None:
            process.terminate()
        result.exit_code = process.wait()
        over.set()
        watcher.join()
    if result.first_update is None and progress() > 0:
        result.first_update = time.monotonic() - started
    result.total = time.monotonic() - started
    return result


def _watch_memory(result: Measured, over: threading.Event) -> None:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    while not over.wait(0.3):
        shown = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
        if shown.isdigit():
            result.peak_mib = max(result.peak_mib, int(shown))


def history(output: Path) -> list[dict[str, float]]:
    """log_history of a run of ours; empty before its first step."""
    state = output / "trainer_state.json"
    return json.loads(state.read_text(encoding="utf-8"))["log_history"] if state.exists() else []


def ours(folder: Path, method: str, steps: int, logs: Path, extra: list[str], name: str | None = None) -> Measured:
    """One run of ours, measured."""
    name = name or method
    output = folder / f"out_{name}"
    shutil.rmtree(output, ignore_errors=True)  # the records of an earlier call would pass for the first update
    command = our_command(folder, method, steps, output, extra)
    result = measure(f"ours {name}", command, logs / f"{name}.log", lambda: len(history(output)), {}, 300)
    records = history(output)
    result.steps = [r["timing_s/step"] for r in records if "timing_s/step" in r]
    result.phases = _phases([{k.removeprefix("timing_s/"): v for k, v in r.items()} for r in records[1:]])
    return result


def stock(folder: Path, steps: int, logs: Path) -> Measured:
    """Stock verl's PPO, measured from its console lines."""
    log = logs / "stock.log"
    environment = {
        "PYTHONPATH": os.pathsep.join([str(folder), os.getcwd(), os.environ.get("PYTHONPATH", "")]),
        "VERL_USE_EXTERNAL_MODULES": value_head_file(folder).stem,
        "HYDRA_FULL_ERROR": "1",
        "PYTHONUNBUFFERED": "1",
    }

    def lines() -> list[str]:
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        return [line for line in text.splitlines() if re.search(r"step:\d+ - .*timing_s/step:", line)]

    result = measure("stock verl ppo", stock_command(folder, steps), log, lambda: len(lines()), environment, 420)
    records = [dict(re.findall(r"timing_s/(\w+):([\d.]+)", line)) for line in lines()]
    result.steps = [float(record["step"]) for record in records]
    result.phases = _phases([{k: float(v) for k, v in record.items()} for record in records[1:]])
    return result


def _phases(records: list[dict[str, float]]) -> dict[str, float]:
    names = [name for name in PHASES if records and all(name in record for record in records)]
    return {name: statistics.median(record[name] for record in records) for name in names}


def main() -> int:
    """Measure what was asked for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for model, rows and runs (2 GB)")
    parser.add_argument("--logs", type=Path, help="folder for logs and table.json; default: --out")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", default=",".join(METHODS), help="methods of ours, with commas")
    parser.add_argument("--stock", action="store_true", help="run stock verl first")
    parser.add_argument("--set", nargs="*", default=[], help="settings for ours: section.key=value")
    arguments = parser.parse_args()
    folder, logs = arguments.out.absolute(), (arguments.logs or arguments.out).absolute()
    logs.mkdir(parents=True, exist_ok=True)
    make_inputs(folder)
    results = [stock(folder, min(arguments.steps, 4), logs)] if arguments.stock else []
    for method in filter(None, arguments.only.split(",")):
        results.append(ours(folder, method, arguments.steps, logs, arguments.set))
    (logs / "table.json").write_text(json.dumps([vars(r) for r in results], indent=1), encoding="utf-8")
    print("| command | first update s | later step s | peak GB | whole s | later steps, median s |")
    print("|---|---|---|---|---|---|")
    for result in results:
        print(result.row() + ("" if result.exit_code == 0 else f" exit code {result.exit_code}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
