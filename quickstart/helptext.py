"""The texts of `--help`, `--print-config` and `--dry-run`, made from the dataclasses so that they cannot grow old."""

from __future__ import annotations

import dataclasses
import shutil
import textwrap
import typing
from typing import Any

from quickstart.arguments import PREFERENCE_TYPES, SECTIONS
from quickstart.words import counted

USAGE = """\
usage: python -m quickstart.run [--config FILE] [section.key=value ...]

Trains a language model with verl's own trainer and writes everything to outputs/.

  --config FILE    YAML file with the settings; default configs/ppo_min.yaml
  --dry-run        check what a run checks (rows, models, reward, folder), print the plan, start nothing
  --print-config   the settings with every `auto` filled in, as YAML that --config reads; checks them alone
  --debug          on a bug of ours: show the traceback
  --version, --help

  profile=cpu|gpu  take this profile of the config; default: what the machine is
  verl.KEY=VALUE   any key of verl's own config

examples:
  python -m quickstart.run
  python -m quickstart.run rl.rl_type=grpo training.max_steps=10
  python -m quickstart.run --config mine.yaml data.train_file=my.jsonl data.columns.prompt=question
"""


def full() -> str:
    """Usage and every setting."""
    width = min(max(shutil.get_terminal_size().columns, 60), 110)
    return "\n".join([USAGE, *(section_help(section, width) for section in SECTIONS)])


def section_help(section: str, width: int) -> str:
    """One section: each key with its default, its choices and what it does."""
    kinds = typing.get_type_hints(SECTIONS[section])
    lines = [f"{section}: {(SECTIONS[section].__doc__ or '').splitlines()[0]}"]
    for field in dataclasses.fields(SECTIONS[section]):
        lines.append(f"  {section}.{field.name}={default_text(field)}")
        lines.append(
            textwrap.fill(field_doc(field, kinds[field.name]), width, initial_indent=" " * 6, subsequent_indent=" " * 6)
        )
    return "\n".join(lines) + "\n"


def default_text(field: dataclasses.Field[Any]) -> str:
    """As one would type it."""
    if field.default is dataclasses.MISSING:
        return "{}"
    words = {None: "null", True: "true", False: "false"}
    is_word = field.default is None or isinstance(field.default, bool)
    return words[field.default] if is_word else str(field.default)


def field_doc(field: dataclasses.Field[Any], kind: Any) -> str:
    """The explanation, then the choices where they are words."""
    from quickstart.config.casting import members

    choices = [
        str(c) for arm in members(kind) if typing.get_origin(arm) is typing.Literal for c in typing.get_args(arm)
    ]
    tail = f" [{' | '.join(choices)}]" if len(choices) > 1 else ""
    return f"{field.metadata['doc']}{tail}"


def plan(run: Any) -> str:
    """The settings of a run as YAML; before them, as comments, what was chosen, the batch arithmetic and the notices.

    run: cfg, choices and notices (trainers.checking.Foreseen).
    """
    from quickstart.config import to_yaml
    from quickstart.record.recorder import settings_text

    notices = [f"note: {notice}" for notice in run.notices]
    text = "\n".join([settings_text(run.cfg, run.choices), *notices, batch_text(run.cfg)])
    return textwrap.indent(text, "# ", lambda line: True) + "\n" + to_yaml(run.cfg)


def batch_text(cfg: Any) -> str:
    """How the sizes multiply out."""
    from quickstart.config import generations, samples_per_step, samples_per_update

    rl, update = cfg.rl, samples_per_update(cfg)
    if rl.rl_type in PREFERENCE_TYPES:
        return f"batches: one update takes {counted(update, 'row')}, {rl.per_device_train_batch_size} at a time"
    step = samples_per_step(cfg)
    prompts, answers = counted(rl.rollout_batch_size, "prompt"), counted(generations(cfg), "answer")
    updates = counted(step // update * rl.ppo_epochs, "update")
    return (
        f"batches: one step is {prompts} x {answers} = {counted(step, 'sample')}, "
        f"used in {updates} of {update}, {rl.per_device_train_batch_size} at a time"
    )
