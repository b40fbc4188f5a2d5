"""Before the start: models found, rows read and checked, reward loaded, steps counted. Writes nothing into outputs/.

Imports transformers for the tokenizer, but neither torch's training parts nor verl; any fault here ends the command
with exit code 2 and the output folder as it was.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quickstart import config, rewards
from quickstart.arguments import CRITIC_TYPES, RunConfig
from quickstart.data import Prepared, prepare
from quickstart.doctor.hub import model_folder
from quickstart.doctor.model import check_model_folder
from quickstart.errors import Fault, UserError
from quickstart.outputs import OutputFolder

if TYPE_CHECKING:
    from quickstart.verl_config import RunPaths

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMED_TEMPLATES = {"chatml": CHATML}
MODEL_FIELDS = ("model_name_or_path", "tokenizer_name_or_path", "critic_model_name_or_path")


class _Terminal:
    """Where the user's reward prints to: decided after the reward has been loaded, once the console is captured."""

    def __init__(self) -> None:
        self.factory: Any = nullcontext

    def __call__(self) -> AbstractContextManager[Any]:
        return self.factory()


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A run that can start."""

    cfg: RunConfig  # model names are local folders now
    tokenizer: Any
    prepared: Prepared
    reward: rewards.Guard
    steps: int
    terminal: _Terminal = field(repr=False)

    @property
    def notices(self) -> list[str]:
        """What was understood, repaired or left out while reading."""
        files = self.cfg.data.train_file
        name = files if isinstance(files, str) else ", ".join(files)
        return [f"Read {self.num_train} rows from {name} ({self.prepared.shape})", *self.prepared.notices]

    @property
    def num_train(self) -> int:
        """Training rows."""
        return self.prepared.num_train

    @property
    def data_sha256(self) -> str:
        """Of the training rows as verl reads them."""
        return self.prepared.sha256

    def guard_terminal(self, factory: Any) -> None:
        """From now on the user's reward runs inside this context."""
        self.terminal.factory = factory

    def paths(self, outputs: OutputFolder) -> RunPaths:
        """The files that verl is told about."""
        from quickstart.verl_config import RunPaths

        file, name, kwargs = rewards.for_verl(self.cfg, self.reward)
        return RunPaths(
            train=self.prepared.train_path,
            evaluation=self.prepared.eval_path or self.prepared.train_path,
            checkpoints=outputs.checkpoints,
            reward_file=file,
            reward_name=name,
            reward_kwargs=kwargs,
            chat_template=chat_template(self.cfg),
        )


def prepare_run(cfg: RunConfig) -> Ready:
    """Look at everything a run needs. Raises UserError with all faults of a stage at once."""
    cfg = with_local_models(cfg)
    terminal = _Terminal()
    reward = rewards.build(cfg, terminal)
    tokenizer = load_tokenizer(cfg)
    prepared = prepare(cfg, tokenizer)
    steps = config.check_steps(cfg, prepared.num_train)
    check_evaluation(cfg)
    return Ready(cfg=cfg, tokenizer=tokenizer, prepared=prepared, reward=reward, steps=steps, terminal=terminal)


def with_local_models(cfg: RunConfig) -> RunConfig:
    """Every model name as a checked local folder. Raises UserError with the faults of all of them."""
    found: dict[str, Any] = {}
    faults: list[Fault] = []
    for name in MODEL_FIELDS:
        wanted = vars(cfg.model)[name]
        if wanted is None or (name.startswith("critic") and cfg.rl.rl_type not in CRITIC_TYPES):
            continue
        try:
            folder = model_folder(wanted, f"model.{name}")
        except UserError as error:  # gathered: all models are looked at
            faults.extend(error.faults)
            continue
        faults.extend([] if name.startswith("tokenizer") else check_model_folder(folder, f"model.{name}"))
        found[name] = str(folder)
    if faults:
        raise UserError(faults)
    return dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, **found))


def load_tokenizer(cfg: RunConfig) -> Any:
    """The policy's tokenizer with its chat template, checked for what training needs.

    Raises:
        UserError: it cannot be loaded, or has no end-of-text token (an answer could never end).
    """
    from transformers import AutoTokenizer

    name = cfg.model.tokenizer_name_or_path or cfg.model.model_name_or_path
    field_name = "model.tokenizer_name_or_path" if cfg.model.tokenizer_name_or_path else "model.model_name_or_path"
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=cfg.model.trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        first = str(error).strip().splitlines()[0]
        fix = "copy the tokenizer files of the original model there"
        raise UserError(Fault(field=field_name, found=name, rule=f"no tokenizer loads: {first}", fix=fix)) from error
    if tokenizer.eos_token_id is None:
        rule = "the tokenizer has no end-of-text token (eos_token), so no answer could end"
        fix = "set eos_token in the folder's tokenizer_config.json"
        raise UserError(Fault(field=field_name, found=name, rule=rule, fix=fix))
    if not tokenizer.chat_template and cfg.model.chat_template:
        tokenizer.chat_template = NAMED_TEMPLATES[cfg.model.chat_template]
    return tokenizer


def chat_template(cfg: RunConfig) -> str | None:
    """The named template that verl must be told about, for a tokenizer without one."""
    return NAMED_TEMPLATES[cfg.model.chat_template] if cfg.model.chat_template else None


def check_evaluation(cfg: RunConfig) -> None:
    """Evaluation needs rows of its own."""
    asked = [name for name in ("eval_steps", "eval_before_train") if vars(cfg.training)[name]]
    if asked and cfg.data.eval_file is None:
        raise UserError(
            Fault(
                field=f"training.{asked[0]}",
                found=str(vars(cfg.training)[asked[0]]),
                rule="evaluation needs rows that are not trained on",
                fix="set data.eval_file to a file of such rows, or leave evaluation off",
            )
        )
