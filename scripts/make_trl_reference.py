"""What TRL computes, stored for tests/test_preference_parity.py. Runs in an environment of its own: trl breaks verl.

    python -m venv /tmp/trlenv
    /tmp/trlenv/bin/pip install torch==2.13.0 "trl==1.16.*" transformers peft accelerate datasets
    /tmp/trlenv/bin/python scripts/make_trl_reference.py [--model data/bundled_model] [--only dpo]

One file a case under tests/data: loss, gradient norm, rewards and KL of each step, and of each weight its sum, the
length of its way, and a few entries. Imports nothing of quickstart.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / "data" / "sample_100.jsonl"
TARGET = ROOT / "tests" / "data"
MICRO, ACCUMULATE, BETA = 4, 2, 0.1
# AdamW gives a gradient that is mere rounding a full step: TRL in float32 and TRL in float64 part by a third of the
# learning rate in single weights. At 1e-4 that is 3e-5, more than the tests allow.
LEARNING_RATE = 1e-5
LORA_RANK, LORA_ALPHA = 4, 8
ENTRIES = 6  # kept of each weight
KTO_WEIGHTS = {"desirable_weight": 1.33, "undesirable_weight": 0.9}
# case -> trainer, steps, arguments of its own
CASES: dict[str, dict[str, Any]] = {
    "dpo": {"kind": "dpo", "steps": 10},
    "dpo_lora": {"kind": "dpo", "steps": 10, "lora": True, "learning_rate": 1e-4},
    "dpo_ipo": {"kind": "dpo", "steps": 3, "loss_type": "ipo"},
    "dpo_hinge": {"kind": "dpo", "steps": 3, "loss_type": "hinge"},
    "kto": {"kind": "kto", "steps": 10, **KTO_WEIGHTS},
    "kto_lora": {"kind": "kto", "steps": 10, "lora": True, "learning_rate": 1e-4, **KTO_WEIGHTS},
}


def is_good(index: int) -> bool:
    """Which answer of pair `index` is the labelled one: 2 in 5 good, unevenly over the batches."""
    return index % 5 in (0, 3)


def fill_adapters(named: list[tuple[str, torch.Tensor]]) -> None:
    """The same LoRA weights on both sides: A drawn from a fixed seed in the order of names, B zero."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, weight in sorted((plain_name(name), weight) for name, weight in named):
            if "lora_A" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) / math.sqrt(weight.shape[1]))
            else:
                weight.zero_()


def plain_name(name: str) -> str:
    """A weight's name without what wrappers put around it."""
    for part in ("_fsdp_wrapped_module.", "base_model.model.", ".default", ".base_layer"):
        name = name.replace(part, "")
    return name


def places(size: int) -> list[int]:
    """Positions of the entries that are kept."""
    return sorted({(i * 2654435761) % size for i in range(1, ENTRIES + 1)})


def fingerprint(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Of each weight: its sum, the length of its way from the start, and entries. Weights that stood still are out."""
    found = {}
    for name, end in after.items():
        move = (end.double() - before[name].double()).norm().item()
        flat = end.flatten()
        if move:
            entries = [flat[i].item() for i in places(flat.numel())]
            found[name] = {"sum": end.double().sum().item(), "move": move, "entries": entries}
    return found


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every parameter, by plain name."""
    return {plain_name(name): weight.detach().clone() for name, weight in model.named_parameters()}


def message(role: str, text: str) -> list[dict[str, str]]:
    """A conversation of one message."""
    return [{"role": role, "content": text}]


def dataset_of(kind: str) -> Any:
    """The sample rows as TRL reads them, in the order of the file."""
    from datasets import Dataset

    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    if kind == "dpo":
        return Dataset.from_list(
            [
                {
                    "prompt": message("user", r["prompt"]),
                    "chosen": message("assistant", r["chosen"]),
                    "rejected": message("assistant", r["rejected"]),
                }
                for r in rows
            ]
        )
    return Dataset.from_list(
        [
            {
                "prompt": message("user", r["prompt"]),
                "completion": message("assistant", r["chosen" if is_good(i) else "rejected"]),
                "label": is_good(i),
            }
            for i, r in enumerate(rows)
        ]
    )


def trainer_of(model_path: str, case: dict[str, Any], folder: str) -> Any:
    """TRL's trainer in plain settings: float32, CPU, AdamW without decay, constant rate, rows in order."""
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

    torch.manual_seed(0)
    settings = {key: value for key, value in case.items() if key not in ("kind", "steps", "lora")}
    arguments: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": MICRO,
        "gradient_accumulation_steps": ACCUMULATE,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "max_steps": case["steps"],
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "optim": "adamw_torch",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "train_sampling_strategy": "sequential",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "max_length": None,
        "beta": BETA,
        **settings,
    }
    adapters = LoraConfig(
        r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    trainer_type, config_type = (DPOTrainer, DPOConfig) if case["kind"] == "dpo" else (KTOTrainer, KTOConfig)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation="sdpa")
    trainer = trainer_type(
        model=model,
        args=config_type(**arguments),
        train_dataset=dataset_of(case["kind"]),
        processing_class=AutoTokenizer.from_pretrained(model_path),
        peft_config=adapters if case.get("lora") else None,
    )
    if case.get("lora"):
        fill_adapters([(name, weight) for name, weight in trainer.model.named_parameters() if "lora_" in name])
    return trainer


def watched(trainer: Any) -> list[dict[str, Any]]:
    """What each micro batch computed, added to the returned list while the trainer runs."""
    micro: list[dict[str, Any]] = []
    original: Callable[..., Any] = trainer._compute_loss

    def compute(model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        loss = original(model, inputs, return_outputs)
        metrics = trainer._metrics["train"]
        names = ("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "rewards/accuracies", "kl")
        labels = inputs["label"].tolist() if "label" in inputs else [1] * MICRO
        counts = {"chosen": sum(labels), "rejected": len(labels) - sum(labels) if "label" in inputs else MICRO}
        found = {name: metrics[name][-1] for name in names if metrics.get(name)}
        micro.append({"loss": loss.item(), "counts": counts, **found})
        return loss

    trainer._compute_loss = compute
    return micro


def by_step(micro: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Micro batches put together to steps: TRL averages their averages, here rows count alike."""
    steps = []
    for start in range(0, len(micro), ACCUMULATE):
        parts = micro[start : start + ACCUMULATE]
        step = {"loss": sum(part["loss"] for part in parts) / len(parts)}
        for name in sorted({key for part in parts for key in part} - {"loss", "counts"}):
            kind = name.rpartition("/")[2]
            weights = [part["counts"].get(kind, 1) for part in parts]
            values = [part.get(name, 0.0) for part in parts]
            step[name] = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
        steps.append(step)
    return steps


def widen(model: torch.nn.Module | None) -> None:
    """Let TRL add up log-probs in float64: 500 nats, an answer's, are good to 3e-5 in float32, and so is the KL."""

    def hook(module: torch.nn.Module, given: Any, output: Any) -> Any:
        output.log_probs = output.log_probs.double()
        return output

    if model is not None:
        model.register_forward_hook(hook)


def trained(model: str, case: dict[str, Any], *, wide: bool) -> tuple[list[dict[str, float]], Any, Any]:
    """Run a case: its steps, and the weights before and after. wide: sums of log-probs in float64."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(model, case, folder)
        if wide:
            widen(trainer.model)
            widen(trainer.ref_model)
        before, micro = weights_of(trainer.model), watched(trainer)
        trainer.train()
        after = weights_of(trainer.model)
    history = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    steps = by_step(micro)
    for step, entry in zip(steps, history, strict=True):
        step["grad_norm"] = entry["grad_norm"]
    return steps, before, after


def digest(model: Path) -> str:
    """Of the weights, so that a test can tell numbers of another model from wrong ones."""
    return hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()


def main() -> None:
    """Run the cases and write their files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "data" / "bundled_model"))
    parser.add_argument("--only", choices=CASES, help="one case")
    parser.add_argument("--full", type=Path, help="folder for all weights, to look at every entry by hand")
    options = parser.parse_args()
    import transformers
    import trl

    torch.set_num_threads(2)
    for name in [options.only] if options.only else list(CASES):
        steps, before, after = trained(options.model, CASES[name], wide=False)
        if CASES[name]["kind"] == "kto":
            wide, _, _ = trained(options.model, CASES[name], wide=True)
            for step, exact in zip(steps, wide, strict=True):
                step["kl_float64"] = exact["kl"]
        record = {
            "versions": {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__},
            "model_sha256": digest(Path(options.model)),
            "case": CASES[name],
            "steps": steps,
            "weights": fingerprint(before, after),
        }
        TARGET.mkdir(exist_ok=True)
        path = TARGET / f"trl_reference_{name}.json"
        path.write_text(json.dumps(record, indent=None, separators=(",", ":")) + "\n", encoding="utf-8")
        if options.full:
            options.full.mkdir(exist_ok=True)
            torch.save(after, options.full / f"{name}.pt")
        print(name, f"{path.stat().st_size} bytes", [round(step["loss"], 6) for step in steps])


if __name__ == "__main__":
    main()
