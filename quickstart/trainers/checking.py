"""Everything that a user can get wrong in a run, looked at before its output folder is touched.

    run = check(cfg, choices)        # what `train` starts from
    run = foresee(cfg, choices)      # the same for --dry-run: downloads nothing

Both raise UserError. Not here: the checks themselves (doctor, startup, outputs, resume), and what happens afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from quickstart import config, rewards, verl_compose
from quickstart.arguments import RunConfig
from quickstart.config import Choice
from quickstart.data import look_at_rows
from quickstart.doctor import before as doctor
from quickstart.doctor.finding import Finding
from quickstart.doctor.hub import find_local, require_hub
from quickstart.errors import permitted
from quickstart.outputs import check as check_output
from quickstart.trainers import environment, resume, startup


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A run that can start.

    cfg: fitted to the memory budget; model names are local folders, `latest` is a checkpoint.
    """

    cfg: RunConfig
    choices: Sequence[Choice]
    ready: startup.Ready
    point: resume.Point | None
    findings: list[Finding]

    @property
    def notices(self) -> list[str]:
        """What the user should know before it starts."""
        return [*self.ready.notices, *doctor.notices(self.findings)]


@dataclass(frozen=True, kw_only=True)
class Foreseen:
    """What a dry run shows."""

    cfg: RunConfig
    choices: Sequence[Choice]
    notices: list[str]


@permitted()
def check(cfg: RunConfig, choices: Sequence[Choice]) -> Checked:
    """Look at all that a run needs, downloading models where that is needed. Writes nothing into the output folder.

    Args:
        cfg: no "auto" left (config.resolve).

    Raises:
        UserError: with all faults of a stage at once.
    """
    findings = _before_models(cfg)
    ready = startup.prepare_run(cfg)
    fitted = doctor.within_budget(ready.cfg, choices, tokenizer=ready.tokenizer, rows=ready.rows.facts)
    cfg, choices = fitted.cfg, fitted.choices
    findings += doctor.training(cfg, tokenizer=ready.tokenizer, rows=ready.rows.facts, reward=ready.reward)
    point = resume.find(cfg, ready.steps)
    if point is not None:
        training = dataclasses.replace(cfg.training, resume_from_checkpoint=str(point.folder))
        cfg = dataclasses.replace(cfg, training=training)
    ready = dataclasses.replace(ready, cfg=cfg)
    return Checked(cfg=cfg, choices=choices, ready=ready, point=point, findings=findings)


@permitted()
def foresee(cfg: RunConfig, choices: Sequence[Choice]) -> Foreseen:
    """The same without a download: what needs a model that is not on this machine waits for the run, and is named."""
    missing = {name: field for field, name in startup.models_of(cfg) if find_local(name, field) is None}
    with contextlib.redirect_stdout(sys.stderr):  # the user's reward may print; stdout is for the plan
        if not missing:
            run = check(cfg, choices)
            return Foreseen(cfg=run.cfg, choices=run.choices, notices=run.notices)
        findings = _before_models(cfg)
        for name, field in missing.items():
            require_hub(name, field)
        if cfg.rl.reward != "model":
            rewards.build(cfg)
        rows = look_at_rows(cfg)
        config.check_steps(cfg, rows.count)
    fitted = doctor.foreseen(config.Resolved(cfg=cfg, choices=tuple(choices)))
    waits = f"{', '.join(missing)}: not on this machine yet. Lengths in tokens and memory are checked by the run itself"
    notices = [*rows.notices, *doctor.notices(findings), waits]
    return Foreseen(cfg=fitted.cfg, choices=fitted.choices, notices=notices)


def _before_models(cfg: RunConfig) -> list[Finding]:
    """What takes neither model nor rows."""
    environment.set_variables(str(cfg.training.device))  # before the first import of torch
    verl_compose.check_keys(cfg.verl)
    check_output(cfg.training.output_dir)
    return doctor.environment(cfg)
