"""run.json: what one must know to run it again. Versions are read from package metadata, nothing heavy is imported."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import quickstart
from quickstart.arguments import RunConfig
from quickstart.config import Choice, probe_machine

PACKAGES = (
    "verl",
    "torch",
    "transformers",
    "tensordict",
    "TransferQueue",
    "ray",
    "datasets",
    "peft",
    "numpy",
    "vllm",
    "flash-attn",
)


def start_facts(cfg: RunConfig, choices: Sequence[Choice], argv: Sequence[str]) -> dict[str, Any]:
    """Everything that is known when a run starts."""
    return {
        "quickstart": quickstart.__version__,
        "rl_type": cfg.rl.rl_type,
        "started": now(),
        "ended": None,
        "command": list(argv) or None,
        "config": cfg.source.config_path,
        "profile": cfg.source.profile,
        "overrides": list(cfg.source.overrides),
        "chosen": {choice.field: {"value": choice.value, "why": choice.why} for choice in choices},
        "seed": cfg.training.seed,
        "device": device_facts(cfg),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions(),
        "git_commit": git_commit(),
        "folder": os.getcwd(),
        "process": os.getpid(),
    }


def now() -> str:
    """Local time with its zone, ISO 8601."""
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def versions() -> dict[str, str | None]:
    """Version of each package that matters, None where it is not installed."""
    return {name: installed_version(name) for name in PACKAGES}


def installed_version(name: str) -> str | None:
    """From the package's metadata."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def device_facts(cfg: RunConfig) -> dict[str, Any]:
    """The device that the run uses."""
    facts: dict[str, Any] = {"kind": cfg.training.device, "count": cfg.training.num_devices}
    if cfg.training.device == "cuda":
        facts["names"] = [gpu.name for gpu in probe_machine().gpus]
        facts["memory_bytes"] = [gpu.memory_bytes for gpu in probe_machine().gpus]
    else:
        facts["threads"] = cfg.training.num_threads
    return facts


def git_commit() -> str | None:
    """Commit of this package's checkout, with -dirty where tracked files differ. None: no checkout, or no git."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
