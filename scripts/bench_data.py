"""How long the data room takes for 100,000 rows with prompts of about 200 tokens, first and again, and in what memory.

    .venv/bin/python scripts/bench_data.py [--rows 100000] [--model data/bundled_model] [--kind jsonl]

Limits (issue 3): first reading under 60 s on 2 cores with less than 1.5 GB at its peak, second under 2 s. Exit code 1
where one is missed. Each reading is a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ENGLISH = "the of and to in is that it was for on with as he be at by had not are but from or have an they which"
CHINESE = (
    "的一是在不了有和人这中大为上个国我以要他时来用们生到作地于出就分对成会可主发年动同工也能下过子说产种面而方后多定行"
)
LENGTHS = {"prompt": 180, "chosen": 50, "rejected": 40}  # in words or characters
LIMITS = {"first": 60.0, "second": 2.0, "peak_gb": 1.5}


def write_rows(path: Path, rows: int, kind: str) -> None:
    """Made-up rows, half English and half Chinese, with prompts of about 200 tokens."""
    source = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        file.write("[\n" if kind == "json" else "")
        for index in range(rows):
            row = {name: text(source, index, length) for name, length in LENGTHS.items()}
            separator = ",\n" if kind == "json" and index + 1 < rows else "\n"
            file.write(json.dumps(row, ensure_ascii=False) + separator)
        file.write("]\n" if kind == "json" else "")


def text(source: random.Random, index: int, length: int) -> str:
    """A text of that many words or characters that nobody else has."""
    if index % 2:
        return "".join(source.choices(CHINESE, k=length)) + f"{index}"
    return " ".join(source.choices(ENGLISH.split(), k=length)) + f" {index}"


def read_once(path: str, model: str, folder: str) -> None:
    """One reading, in this process: prints seconds and peak memory as JSON."""
    from transformers import AutoTokenizer

    from quickstart import config
    from quickstart.data import prepare

    tokenizer = AutoTokenizer.from_pretrained(model)
    data = {"train_file": path, "max_prompt_length": 1024, "cache_dir": f"{folder}/cache"}
    cfg = config.from_arguments({}, data, {}, {"output_dir": f"{folder}/outputs"})
    start, start_cpu = time.perf_counter(), time.process_time()
    prepared = prepare(cfg, tokenizer)
    seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # kB on Linux
    result = {"seconds": seconds, "cpu": cpu, "peak_gb": peak, "rows": prepared.num_train}
    print(json.dumps(result | {"longest": prepared.longest_prompt}))


def measure(path: Path, model: str, folder: str) -> dict[str, Any]:
    """One reading in a child process."""
    command = [sys.executable, __file__, "--read", str(path), "--model", model, "--folder", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> int:
    """Write the rows, read them twice, compare with the limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--model", default="data/bundled_model", help="folder or name with a tokenizer")
    parser.add_argument("--kind", choices=("jsonl", "json"), default="jsonl")
    parser.add_argument("--read", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        read_once(args.read, args.model, args.folder)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"rows.{args.kind}"
        write_rows(path, args.rows, args.kind)
        print(f"{args.rows} rows, {path.stat().st_size / 1e6:.0f} MB, {args.kind}")
        first, second = (measure(path, args.model, folder) for _ in range(2))
    for name, result in (("first", first), ("second", second)):
        times = f"{result['seconds']:.2f} s ({result['cpu']:.2f} s of CPU time on all threads)"
        print(f"{name}: {times}, peak memory {result['peak_gb']:.2f} GB, longest prompt {result['longest']} tokens")
    met = first["seconds"] < LIMITS["first"] and second["seconds"] < LIMITS["second"]
    met = met and max(first["peak_gb"], second["peak_gb"]) < LIMITS["peak_gb"]
    print("within the limits" if met else f"over the limits {LIMITS}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
