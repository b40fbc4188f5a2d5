"""What every training run has checked first: the cheap part of the doctor, under 2 s beside what the run does anyway.

    findings = before.environment(cfg)                                   # before the tokenizer is loaded
    fitted = before.within_budget(cfg, choices, tokenizer=..., rows=...) # settings under training.memory_budget_gb
    findings += before.training(cfg, tokenizer=..., rows=..., reward=...)   # once model, rows and reward are there
    before.write(outputs.doctor, findings)

All raise one UserError with every error. Nothing here imports torch (a reward that does so by itself aside). Not
here: child processes and the hub; the command has them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quickstart import __version__
from quickstart.arguments import RunConfig
from quickstart.config import Choice, Resolved
from quickstart.doctor import checks
from quickstart.doctor.facts import Facts
from quickstart.doctor.finding import Finding, counts, raise_errors, to_mapping
from quickstart.doctor.fit import FIELD
from quickstart.doctor.rows import RowFacts
from quickstart.doctor.running import run_checks
from quickstart.errors import Fault, UserError
from quickstart.rewards import Guard
from quickstart.writing import write_json

REWARD_SECONDS = 1.0  # for trying the reward; a slow one is tried on fewer rows


def environment(cfg: RunConfig) -> list[Finding]:
    """Host, packages, torch build, GPU and disks. Raises UserError."""
    facts = Facts(known={"cfg": cfg})
    findings = run_checks([*checks.environment_checks(facts), *checks.disk_checks(facts)])
    raise_errors(findings)
    return findings


def training(cfg: RunConfig, *, tokenizer: Any, rows: RowFacts, reward: Guard | None) -> list[Finding]:
    """Model, rows, plans, settings and reward of a run whose models are folders. Raises UserError."""
    known = {"cfg": cfg, "tokenizer": tokenizer, "training_rows": rows}
    known |= {} if reward is None else {"reward": reward}
    facts = Facts(known=known)
    findings = run_checks([*checks.model_checks(facts), *checks.run_checks_of(facts, REWARD_SECONDS)])
    raise_errors(findings)
    return findings


def within_budget(cfg: RunConfig, choices: Sequence[Choice], *, tokenizer: Any, rows: RowFacts) -> Resolved:
    """Settings that keep to training.memory_budget_gb, and what was chosen for it. Without a budget as they are.

    Raises:
        UserError: nothing keeps to it.
    """
    if cfg.training.memory_budget_gb is None:
        return Resolved(cfg=cfg, choices=tuple(choices))
    facts = Facts(known={"cfg": cfg, "tokenizer": tokenizer, "training_rows": rows})
    if facts.shape is None:
        rule, fix = "config.json does not give the model's widths, so there is no plan", "leave it out"
        raise UserError(Fault(field=FIELD, found=f"{cfg.training.memory_budget_gb:g}", rule=rule, fix=fix))
    return facts.within_budget(choices)


def foreseen(resolved: Resolved) -> Resolved:
    """The same before a run, for --dry-run; where a model is not on this machine, the plan has to wait for it.

    Raises:
        UserError: nothing keeps to the budget.
    """
    cfg = resolved.cfg
    if cfg.training.memory_budget_gb is None:
        return resolved
    facts = Facts(known={"cfg": cfg})
    if facts.attempt(facts.planner) is None:
        why = "what it changes is chosen when the model is on this machine"
        later = Choice(field=FIELD, value=cfg.training.memory_budget_gb, why=why)
        return Resolved(cfg=cfg, choices=(*resolved.choices, later))
    return facts.within_budget(resolved.choices)


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
