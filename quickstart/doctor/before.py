"""What every training run has checked first: the cheap part of the doctor, under 2 s beside what the run does anyway.

    findings = before.environment(cfg)                                   # before the tokenizer is loaded
    findings += before.training(cfg, tokenizer=..., reward=...)          # once model, rows and reward are there
    before.write(outputs.doctor, findings)

Both raise one UserError with every error. Nothing here imports torch (a reward that does so by itself aside). Not
here: child processes and the hub; the command has them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quickstart import __version__
from quickstart.arguments import RunConfig
from quickstart.doctor import checks
from quickstart.doctor.facts import Facts
from quickstart.doctor.finding import Finding, counts, raise_errors, to_mapping
from quickstart.doctor.running import run_checks
from quickstart.rewards import Guard
from quickstart.writing import write_json

REWARD_SECONDS = 1.0  # for trying the reward; a slow one is tried on fewer rows


def environment(cfg: RunConfig) -> list[Finding]:
    """Host, packages, torch build, GPU and disks. Raises UserError."""
    facts = Facts(known={"cfg": cfg})
    findings = run_checks([*checks.environment_checks(facts), *checks.disk_checks(facts)])
    raise_errors(findings)
    return findings


def training(cfg: RunConfig, *, tokenizer: Any, reward: Guard | None) -> list[Finding]:
    """Model, rows, plans, settings and reward of a run whose models are folders. Raises UserError."""
    known = {"cfg": cfg, "tokenizer": tokenizer} | ({} if reward is None else {"reward": reward})
    facts = Facts(known=known)
    findings = run_checks([*checks.model_checks(facts), *checks.run_checks_of(facts, REWARD_SECONDS)])
    raise_errors(findings)
    return findings


def notices(findings: Sequence[Finding]) -> list[str]:
    """The warnings as lines for the console."""
    return [f"Warning: {f.text}. To do: {f.fix}" for f in findings if f.state == "warning"]


def report(findings: Sequence[Finding]) -> dict[str, Any]:
    """What stands in doctor.json and what --json prints."""
    return {
        "quickstart": __version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "states": counts(findings),
        "findings": to_mapping(findings),
    }


def write(path: Path, findings: Sequence[Finding]) -> None:
    """doctor.json."""
    write_json(path, report(findings))
