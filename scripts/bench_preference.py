"""DPO and KTO here against TRL on a CPU: seconds from the start of the process to the first update, and a later step.

    .venv/bin/python scripts/bench_preference.py --trl /tmp/trlenv/bin/python [--runs 3] [--kinds dpo kto]

Both sides read the same 100 rows, compute the reference log-probs of all of them first, and train the same model in
float32 with the same batches, turn about, each time in a new process. Ours is the real command with all that it does
besides: checks, sample answers, records. TRL's is a bare script (this file, started with --side). With --lazy TRL
computes the reference of a batch when it comes, its default, with a second model: its first update comes sooner, each
step takes longer. See make_trl_reference.py for TRL's environment.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROWS, MODEL = ROOT / "data" / "sample_100.jsonl", ROOT / "data" / "bundled_model"
BATCH, STEPS, RATE = 20, 10, 1e-4


def trl_side(kind: str, precompute: bool) -> None:
    """In TRL's environment: train, and print a line after each step. precompute: the reference of all rows first."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

    class Told(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            print("STEP", flush=True)

    torch.set_num_threads(2)
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    user = lambda row: [{"role": "user", "content": row["prompt"]}]  # noqa: E731
    answer = lambda text: [{"role": "assistant", "content": text}]  # noqa: E731
    table: list[dict[str, object]]
    if kind == "dpo":
        table = [{"prompt": user(r), "chosen": answer(r["chosen"]), "rejected": answer(r["rejected"])} for r in rows]
    else:
        names = ("chosen", "rejected")
        table = [{"prompt": user(r), "completion": answer(r[n]), "label": n == "chosen"} for r in rows for n in names]
    settings = {
        "per_device_train_batch_size": BATCH,
        "max_steps": STEPS,
        "learning_rate": RATE,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "train_sampling_strategy": "sequential",
        "max_length": None,
        "precompute_ref_log_probs": precompute,
    }
    trainer_type, config_type = (DPOTrainer, DPOConfig) if kind == "dpo" else (KTOTrainer, KTOConfig)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_type(
            model=AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
            args=config_type(output_dir=folder, **settings),
            train_dataset=Dataset.from_list(table),
            processing_class=AutoTokenizer.from_pretrained(MODEL),
            callbacks=[Told()],
        )
        trainer.train()


def cpu_seconds(pid: int) -> float:
    """Processor time of a process and its ended children so far; other programs on the machine do not change it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")


def watch(command: list[str], mark: str) -> list[tuple[float, float]]:
    """Seconds by the clock, and of processor time, from the start of a process to each line that holds `mark`."""
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT)
    assert process.stdout is not None
    times = [(time.monotonic() - began, cpu_seconds(process.pid)) for line in process.stdout if mark in line]
    assert process.wait() == 0, f"{command} ended with {process.returncode}"
    return times


def ours(kind: str, folder: str) -> list[tuple[float, float]]:
    """Our command, with nothing in its caches."""
    settings = {
        "rl.rl_type": kind,
        "rl.learning_rate": RATE,
        "rl.per_device_train_batch_size": BATCH,
        "rl.gradient_accumulation_steps": 1,
        "training.max_steps": STEPS,
        "training.output_dir": f"{folder}/outputs",
        "training.device": "cpu",
        "training.save_steps": "never",
        "data.max_response_length": 256,
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    command = [sys.executable, "-m", "quickstart.run", "--config", "configs/ppo_min.yaml", "profile=cpu", *overrides]
    return watch(command, "update done")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", default="/tmp/trlenv/bin/python", help="Python of TRL's environment")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", default=["dpo", "kto"], choices=["dpo", "kto"])
    parser.add_argument("--lazy", action="store_true", help="TRL's default: the reference of a batch when it comes")
    parser.add_argument("--side", choices=["dpo", "kto"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        trl_side(options.side, not options.lazy)
        return
    print(f"{'':18}{'first update, s':>28}{'later step, s':>28}")
    print(f"{'':18}{'ours':>9}{'TRL':>9}{'ratio':>10}{'ours':>9}{'TRL':>9}{'ratio':>10}")
    for kind in options.kinds:
        times: dict[str, list[list[tuple[float, float]]]] = {"ours": [], "trl": []}
        for _ in range(options.runs):
            with tempfile.TemporaryDirectory() as folder:
                times["ours"].append(ours(kind, folder))
            lazy = ["--lazy"] if options.lazy else []
            times["trl"].append(watch([options.trl, __file__, "--side", kind, *lazy], "STEP"))
        for clock, name in enumerate(("by the clock", "processor time")):
            print(f"{kind:4}{name:14}{row(times, clock)}", flush=True)


def row(times: dict[str, list[list[tuple[float, float]]]], clock: int) -> str:
    """Medians of one of the two clocks."""
    cells = []
    first = {side: statistics.median(run[0][clock] for run in runs) for side, runs in times.items()}
    later = {
        side: statistics.median(b[clock] - a[clock] for run in runs for a, b in pairwise(run))
        for side, runs in times.items()
    }
    for found in (first, later):
        cells.append(f"{found['ours']:>9.2f}{found['trl']:>9.2f}{found['ours'] / found['trl']:>10.2f}")
    return "".join(cells)


if __name__ == "__main__":
    main()
