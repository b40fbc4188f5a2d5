"""Before the start: models found, rows read and checked, reward loaded, steps counted. Writes nothing into outputs/.

Imports transformers for the tokenizer, but neither torch's training parts nor verl; any fault here ends the command
with exit code 2 and the output folder as it was.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quickstart import config, rewards
from quickstart.arguments import CRITIC_TYPES, RunConfig
from quickstart.data import Prepared
from quickstart.doctor.hub import model_folder
from quickstart.doctor.model import check_model_folder, read_config
from quickstart.doctor.rows import RowFacts, facts_of, read
from quickstart.doctor.tokens import chat_template, load_tokenizer
from quickstart.errors import Fault, UserError
from quickstart.outputs import OutputFolder
from quickstart.rewards.builtin import check_sources
from quickstart.words import counted

if TYPE_CHECKING:
    from quickstart.trainers.preference_data import PreferenceData
    from quickstart.verl_config import RunPaths

NO_LIMIT = 1 << 30  # positions of a model whose config names no limit

MODEL_FIELDS = (
    "model_name_or_path",
    "tokenizer_name_or_path",
    "critic_model_name_or_path",
    "reward_model_name_or_path",
)


class _Terminal:
    """Where the user's reward prints to: decided after the reward has been loaded, once the console is captured."""

    def __init__(self) -> None:
        self.factory: Any = nullcontext

    def __call__(self) -> AbstractContextManager[Any]:
        return self.factory()


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a run, in the form that its method learns from: one of `prepared` and `preference`."""

    num_train: int
    facts: RowFacts  # what the doctor looks at
    sha256: str
    notices: list[str]
    prepared: Prepared | None = None  # files for rollouts
    preference: PreferenceData | None = None  # token ids in memory


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A run that can start."""

    cfg: RunConfig  # model names are local folders now
    tokenizer: Any
    rows: Rows
    reward: rewards.Guard
    steps: int
    terminal: _Terminal = field(repr=False)

    @property
    def notices(self) -> list[str]:
        """What was understood, repaired or left out while reading."""
        files = self.cfg.data.train_file
        name = files if isinstance(files, str) else ", ".join(files)
        read = counted(self.rows.num_train, "answer" if self.cfg.rl.rl_type == "kto" else "row")
        return [f"Read {read} from {name} ({self.rows.facts.shape})", *self.rows.notices]

    def guard_terminal(self, factory: Any) -> None:
        """From now on the user's reward runs inside this context."""
        self.terminal.factory = factory

    def paths(self, outputs: OutputFolder) -> RunPaths:
        """The files that verl is told about, for a method with rollouts."""
        from quickstart.verl_config import RunPaths

        assert self.rows.prepared is not None, "a method with rollouts"
        file, name, kwargs = rewards.for_verl(self.cfg, self.reward)
        return RunPaths(
            train=self.rows.prepared.train_path,
            evaluation=self.rows.prepared.eval_path or self.rows.prepared.train_path,
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
    rows = _rows(cfg, tokenizer)
    steps = config.check_steps(cfg, rows.num_train)
    return Ready(cfg=cfg, tokenizer=tokenizer, rows=rows, reward=reward, steps=steps, terminal=terminal)


def _rows(cfg: RunConfig, tokenizer: Any) -> Rows:
    found = read(cfg, tokenizer)
    facts = facts_of(found)
    if isinstance(found, Prepared):
        if cfg.rl.reward == "verl":
            check_sources(found.data_sources)
        return Rows(num_train=found.num_train, facts=facts, sha256=found.sha256, notices=found.notices, prepared=found)
    from quickstart.trainers.preference_data import encode

    settings, _ = read_config(Path(cfg.model.model_name_or_path), "model.model_name_or_path")
    assert settings is not None, "with_local_models has looked at it"
    positions = settings.get("max_position_embeddings", NO_LIMIT)
    data = encode(cfg, tokenizer, found.train, found.evaluation, positions)
    notices = [*found.notices, *data.notices]
    return Rows(num_train=len(data.train), facts=facts, sha256=found.sha256, notices=notices, preference=data)


def _is_loaded(cfg: RunConfig, name: str) -> bool:
    """Whether this run loads the model that the setting names."""
    if name.startswith("critic"):
        return cfg.rl.rl_type in CRITIC_TYPES
    return cfg.rl.reward == "model" if name.startswith("reward") else True


def models_of(cfg: RunConfig) -> list[tuple[str, str]]:
    """(setting, name) of the models that this run loads."""
    named = ((name, vars(cfg.model)[name]) for name in MODEL_FIELDS)
    return [(f"model.{name}", wanted) for name, wanted in named if wanted is not None and _is_loaded(cfg, name)]


def with_local_models(cfg: RunConfig) -> RunConfig:
    """Every model name as a checked local folder. Raises UserError with the faults of all of them."""
    found: dict[str, Any] = {}
    faults: list[Fault] = []
    for setting, wanted in models_of(cfg):
        try:
            folder = model_folder(wanted, setting)
        except UserError as error:  # gathered: all models are looked at
            faults.extend(error.faults)
            continue
        name = setting.removeprefix("model.")
        faults.extend([] if name.startswith("tokenizer") else check_model_folder(folder, setting))
        found[name] = str(folder)
    if faults:
        raise UserError(faults)
    return dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, **found))
