"""Ours beside stock verl and TRL on one GPU: the same work, one run of the script, one table.

    python scripts/bench_gpu.py --out /tmp/bench                       # ours: ppo, grpo, dpo, kto
    python scripts/bench_gpu.py --out /tmp/bench --stock               # stock verl's PPO first (5 minutes)
    python scripts/bench_gpu.py --out /tmp/bench --trl /tmp/site       # TRL's dpo and grpo after ours
    python scripts/bench_gpu.py --out /tmp/bench --variant 12gb training.memory_budget_gb=12 \\
        --variant vllm rl.rollout_engine=vllm                          # ours ppo once more with these settings
    python scripts/bench_gpu.py --out /tmp/bench --only= --cost 100x128 400x128 100x512   # prompts x new tokens
    python scripts/bench_gpu.py --out /tmp/bench --only= --learn 30    # the bundled model's reward, GPU beside CPU

Work: a model of Qwen2-0.5B's shape with random weights, 100 prompts, 128 new tokens, updates of 20 samples (dpo, kto:
of 100), bf16 compute with float32 master weights, a rule as reward. Random weights tell nothing about learning (--learn
does); time and memory are those of trained ones. Times are wall-clock from the start of each command; "later step" is
the median of the steps after the first; memory is the peak that nvidia-smi shows.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import bench_gpu_work as work_of
from bench_gpu_work import Work, make_inputs

METHODS = ("ppo", "grpo", "dpo", "kto")
TRL_METHODS = ("dpo", "grpo")
PHASES = ("gen", "old_log_prob", "ref", "values", "update_critic", "update_actor", "update_weights")
ENDS = 3  # steps at each end of a run whose rewards are averaged
LOSSES = ("actor_loss", "critic_loss", "loss", "actor/grad_norm")  # of the first step, to be compared between runs


@dataclass(kw_only=True)
class Measured:
    """One command's figures."""

    name: str
    first_update: float | None = None  # seconds from the start of the command
    steps: list[float] = field(default_factory=list)  # seconds of each step
    phases: dict[str, float] = field(default_factory=dict)  # median seconds in later steps
    peak_mib: int = 0
    total: float = 0.0
    losses: dict[str, float] = field(default_factory=dict)  # of the first step
    answer_tokens: int | None = None  # generated in a step, where that is known
    rewards: list[float] = field(default_factory=list)  # of each step's answers
    exit_code: int | None = None

    def row(self) -> str:
        """One line of the table."""
        later = f"{statistics.median(self.steps[1:]):.2f}" if len(self.steps) > 1 else "-"
        first = "-" if self.first_update is None else f"{self.first_update:.1f}"
        parts = " ".join(f"{name} {seconds:.2f}" for name, seconds in self.phases.items())
        return f"| {self.name} | {first} | {later} | {self.peak_mib / 1024:.1f} | {self.total:.0f} | {parts} |"


def measure(
    name: str, command: list[str], log: Path, progress: Callable[[], int], environment: dict[str, str], limit: float
) -> Measured:
    """Run a command; note when its first step is done, and the largest memory that nvidia-smi shows meanwhile."""
    result = Measured(name=name)
    variables = os.environ | environment
    # with it every run, ours and others', compiles thousands of modules anew: then no cache is warm
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    started = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=variables)
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


def ours(folder: Path, method: str, work: Work, logs: Path, extra: list[str], name: str | None = None) -> Measured:
    """One run of ours, measured."""
    name = name or method
    output = folder / f"out_{name}"
    return of_command(work_of.our_command(folder, method, work, output, extra), work, output, logs / f"{name}.log")


def learn(folder: Path, device: str, work: Work, logs: Path) -> Measured:
    """The bundled model on one device."""
    output = folder / f"out_learn_{device}"
    command = work_of.learn_command(output, device, work.steps)
    return of_command(command, work, output, logs / f"learn_{device}.log")


def of_command(command: list[str], work: Work, output: Path, log: Path) -> Measured:
    """A command of ours, measured by the records that it writes."""
    shutil.rmtree(output, ignore_errors=True)  # the records of an earlier call would pass for the first update
    result = measure(f"ours {log.stem}", command, log, lambda: len(history(output)), {}, 300)
    records = history(output)
    result.steps = [r["timing_s/step"] for r in records if "timing_s/step" in r]
    result.phases = _phases([{k.removeprefix("timing_s/"): v for k, v in r.items()} for r in records[1:]])
    result.losses = {k: v for k, v in records[0].items() if k in LOSSES} if records else {}
    if records and "response_length/mean" in records[-1]:
        result.answer_tokens = round(records[-1]["response_length/mean"] * work.prompts)
    result.rewards = [r["reward"] for r in records if "reward" in r]
    return result


def trl(folder: Path, method: str, steps: int, logs: Path, packages: str) -> Measured:
    """One run of TRL's, measured from the lines that it prints."""
    log = logs / f"trl_{method}.log"

    def lines() -> list[list[str]]:
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        return [line.split() for line in text.splitlines() if line.startswith("STEP ")]

    environment = {"PYTHONPATH": packages, "PYTHONUNBUFFERED": "1"}
    command = work_of.trl_command(folder, method, steps)
    result = measure(f"TRL {method}", command, log, lambda: len(lines()), environment, 300)
    later = [float(words[2]) for words in lines()[1:]]
    # a step's seconds are those since the step before; that of the first is in the time to the first update
    result.steps = [result.first_update or 0.0, *later] if later else []
    return result


def stock(folder: Path, steps: int, logs: Path) -> Measured:
    """Stock verl's PPO, measured from its console lines."""
    log = logs / "stock.log"
    environment = {
        "PYTHONPATH": os.pathsep.join([str(folder), os.getcwd(), os.environ.get("PYTHONPATH", "")]),
        "VERL_USE_EXTERNAL_MODULES": work_of.value_head_file(folder).stem,
        "HYDRA_FULL_ERROR": "1",
        "PYTHONUNBUFFERED": "1",
    }

    def lines() -> list[str]:
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        return [line for line in text.splitlines() if re.search(r"step:\d+ - .*timing_s/step:", line)]

    result = measure(
        "stock verl ppo", work_of.stock_command(folder, steps), log, lambda: len(lines()), environment, 420
    )
    records = [dict(re.findall(r"timing_s/(\w+):([\d.]+)", line)) for line in lines()]
    result.steps = [float(record["step"]) for record in records]
    result.phases = _phases([{k: float(v) for k, v in record.items()} for record in records[1:]])
    return result


def _phases(records: list[dict[str, float]]) -> dict[str, float]:
    names = [name for name in PHASES if records and all(name in record for record in records)]
    return {name: statistics.median(record[name] for record in records) for name in names}


def cost_table(results: list[tuple[Work, Measured]]) -> list[str]:
    """Prompts x new tokens against the time of a token."""
    lines = ["| prompts x new tokens | later step s | ms per 1,000 answer tokens | peak GB |", "|---|---|---|---|"]
    for work, result in results:
        step = statistics.median(result.steps[1:]) if len(result.steps) > 1 else None
        each = f"{step / result.answer_tokens * 1e6:.0f}" if step and result.answer_tokens else "-"
        seconds = "-" if step is None else f"{step:.2f}"
        lines.append(f"| {work.prompts} x {work.new_tokens} | {seconds} | {each} | {result.peak_mib / 1024:.1f} |")
    return lines


def size_of(text: str) -> tuple[int, int]:
    """ "400x128" -> (400, 128)."""
    prompts, _, new_tokens = text.partition("x")
    if not (prompts.isdecimal() and new_tokens.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not PROMPTSxTOKENS; write 400x128")
    return int(prompts), int(new_tokens)


def arguments_of() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for model, rows and runs (2 GB)")
    parser.add_argument("--logs", type=Path, help="folder for logs and table.json; default: --out")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", default=",".join(METHODS), help="methods of ours, with commas")
    parser.add_argument("--stock", action="store_true", help="run stock verl first")
    parser.add_argument("--trl", help="PYTHONPATH with TRL: run its dpo and grpo after ours, those that --only has")
    parser.add_argument("--set", nargs="*", default=[], help="settings for ours: section.key=value")
    parser.add_argument(
        "--variant", nargs="+", action="append", default=[], metavar=("NAME", "SETTING"), help="ours ppo, changed"
    )
    parser.add_argument("--cost", nargs="*", default=[], type=size_of, help="sizes of ours ppo: 400x128")
    parser.add_argument("--cost-steps", type=int, default=2)
    parser.add_argument("--learn", type=int, default=0, metavar="STEPS", help="PPO of the bundled model, GPU and CPU")
    arguments = parser.parse_args()
    if shutil.which("nvidia-smi") is None:
        parser.error("nvidia-smi is not here: this measures an NVIDIA GPU; on a CPU take bench_preference.py")
    return arguments


def runs_of(arguments: argparse.Namespace, folder: Path, logs: Path) -> Iterator[tuple[str, Work, Measured]]:
    """What was asked for, one run after the other: its kind (work, cost or learn), its size, its figures."""
    work = Work(steps=arguments.steps)
    if arguments.stock:
        yield "work", work, stock(folder, min(arguments.steps, 4), logs)
    for method in filter(None, arguments.only.split(",")):
        yield "work", work, ours(folder, method, work, logs, arguments.set)
        if arguments.trl and method in TRL_METHODS:
            yield "work", work, trl(folder, method, arguments.steps, logs, arguments.trl)
    for name, *extra in arguments.variant:
        yield "work", work, ours(folder, "ppo", work, logs, [*arguments.set, *extra], name)
    for prompts, new_tokens in arguments.cost:
        size = Work(prompts=prompts, new_tokens=new_tokens, steps=arguments.cost_steps)
        yield "cost", size, ours(folder, "ppo", size, logs, arguments.set, f"{prompts}x{new_tokens}")
    for device in ("cuda", "cpu") if arguments.learn else ():
        size = Work(steps=arguments.learn)
        yield "learn", size, learn(folder, device, size, logs)


def summary(everything: list[tuple[str, Work, Measured]]) -> list[str]:
    """Losses of the first step, the cost of a token, what was learned."""
    lines = []
    for kind, _, result in everything:
        if kind != "learn" and result.losses:
            losses = ", ".join(f"{name} {value:.6f}" for name, value in result.losses.items())
            lines.append(f"{result.name}, step 1: {losses}")
        if kind == "learn" and len(result.rewards) >= 2 * ENDS:
            first, last = statistics.mean(result.rewards[:ENDS]), statistics.mean(result.rewards[-ENDS:])
            lines.append(f"{result.name}: reward {first:.3f} -> {last:.3f}, means of the first and last {ENDS} steps")
    costs = [(work, result) for kind, work, result in everything if kind == "cost"]
    return lines + (cost_table(costs) if costs else [])


def main() -> int:
    """Measure what was asked for; print each row when its run is over, so that those of a cut call are not lost."""
    arguments = arguments_of()
    folder, logs = arguments.out.absolute(), (arguments.logs or arguments.out).absolute()
    logs.mkdir(parents=True, exist_ok=True)
    make_inputs(folder)
    everything: list[tuple[str, Work, Measured]] = []
    print("| command | first update s | later step s | peak GB | whole s | later steps, median s |")
    print("|---|---|---|---|---|---|", flush=True)
    for kind, work, result in runs_of(arguments, folder, logs):
        everything.append((kind, work, result))
        print(result.row() + ("" if result.exit_code == 0 else f" exit code {result.exit_code}"), flush=True)
        table = json.dumps([vars(result) for _, _, result in everything], indent=1)
        (logs / "table.json").write_text(table, encoding="utf-8")
    print("\n".join(summary(everything)))
    failed = [result.name for _, _, result in everything if result.exit_code != 0]
    if failed:
        print(f"failed: {', '.join(failed)}; why is at the end of their logs in {logs}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
