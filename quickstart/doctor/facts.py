"""Everything that the checks may ask for, found out once and only when somebody asks.

A fact that cannot be had is reported by the first check that asks; the others that need it say so (running.py).
Not here: what a fact means.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from quickstart import config, rewards
from quickstart.arguments import CRITIC_TYPES, ROLLOUT_TYPES, RunConfig
from quickstart.doctor import children, fit, hub
from quickstart.doctor.architecture import Table, known_architectures
from quickstart.doctor.machine import Machine, look_at_machine
from quickstart.doctor.memory import MemoryPlan, memory_plan
from quickstart.doctor.model import check_model_folder, read_config
from quickstart.doctor.parameters import ModelShape, model_shape, tensors
from quickstart.doctor.plan import BatchPlan, batch_plan
from quickstart.doctor.rows import Lengths, RowFacts, measure, row_facts
from quickstart.doctor.running import Blocked, fact
from quickstart.doctor.tokens import TokenFacts, has_own_template, load_tokenizer, token_facts
from quickstart.errors import UserError

T = TypeVar("T")

POLICY, TOKENIZER, CRITIC, REWARD = (
    f"model.{name}"
    for name in (
        "model_name_or_path",
        "tokenizer_name_or_path",
        "critic_model_name_or_path",
        "reward_model_name_or_path",
    )
)


class Facts:
    """Facts of one config on this machine.

    Args:
        path, overrides: the config, as config.load takes it.
        known: facts that are there already, by name: cfg (resolved), tokenizer, reward.
    """

    def __init__(
        self, path: str | None = None, overrides: Sequence[str] = (), known: dict[str, Any] | None = None
    ) -> None:
        self._path, self._overrides = path, list(overrides)
        self.known: dict[str, Any] = dict(known or {})
        self.failed: dict[str, str] = {}
        self._children: dict[str, children.Child] = {}

    # ---- settings and machine ----

    @fact
    def cfg(self) -> RunConfig:
        """The settings, "auto" filled in. Raises UserError."""
        resolved = config.resolve(config.load(self._path, self._overrides))
        self.known["choices"] = resolved.choices
        return resolved.cfg

    @property
    def cfg_or_none(self) -> RunConfig | None:
        """The settings where they are good; None where they are not."""
        return self.attempt(lambda: self.cfg)

    def attempt(self, find: Callable[[], T]) -> T | None:
        """A fact for a check that does without it as well; whoever cannot still gets the error."""
        before = dict(self.failed)
        try:
            return find()
        except (UserError, Blocked):
            self.failed = before
            return None

    @property
    def device(self) -> str:
        """cpu or cuda; what the machine is where the settings do not say."""
        cfg = self.cfg_or_none
        return cfg.training.device if cfg else ("cuda" if self.probe.gpus else "cpu")

    @fact
    def probe(self) -> config.Probe:
        """GPUs, CPUs and packages, as "auto" sees them."""
        return config.probe_machine()

    @fact
    def machine(self) -> Machine:
        """The host."""
        return look_at_machine()

    def start_children(self, names: Sequence[str]) -> None:
        """Ask the questions that take seconds, to be answered while other checks look."""
        makers = {
            "stack": lambda: children.stack_child(self.device),
            "kernel": children.kernel_child,
            "flash": children.flash_child,
            "vllm": children.vllm_child,
        }
        for name in names:
            self._children[name] = makers[name]()

    def child(self, name: str) -> children.Answer | None:
        """The answer of a child; None where it was not asked."""
        known = f"child {name}"
        if known not in self.known:
            self.known[known] = self._children[name].answer() if name in self._children else None
        answer: children.Answer | None = self.known[known]
        return answer

    def close(self) -> None:
        """End the children that nobody waited for."""
        for child in self._children.values():
            child.end()

    # ---- models ----

    def folder(self, field: str) -> Path | None:
        """The folder that a model setting names, looked at by check_model_folder; None where it names none.

        Raises:
            UserError: no such folder, or it does not load.
            Blocked: a hub name that is not downloaded yet.
        """
        name = vars(self.cfg.model)[field.partition(".")[2]]
        known = f"folder {field}"
        if name is None:
            return None
        if known in self.failed:
            raise Blocked(self.failed[known])
        if known not in self.known:
            try:
                self.known[known] = usable_folder(name, field)
            except (UserError, Blocked):
                self.failed[known] = f"model folder of {field}"
                raise
        found: Path = self.known[known]
        return found

    @property
    def model(self) -> Path:
        """The policy's folder."""
        folder = self.folder(POLICY)
        assert folder is not None, "model_name_or_path has a default"
        return folder

    @property
    def tokenizer_folder(self) -> Path:
        """Where the tokenizer lies."""
        return self.folder(TOKENIZER) or self.model

    @property
    def tokenizer_field(self) -> str:
        """The setting that names the tokenizer."""
        return TOKENIZER if self.cfg.model.tokenizer_name_or_path else POLICY

    @fact
    def model_config(self) -> dict[str, Any]:
        """The policy's config.json."""
        return self.config_of(self.model, POLICY)

    def config_of(self, folder: Path, field: str) -> dict[str, Any]:
        """A model's config.json. Raises UserError."""
        found, faults = read_config(folder, field)
        if found is None:
            raise UserError(faults)
        return found

    @fact
    def shape(self) -> ModelShape | None:
        """The policy's numbers; None where config.json lacks them."""
        return model_shape(self.model, self.model_config)

    @property
    def critic_shape(self) -> ModelShape | None:
        """The value model's own numbers; None where it starts from the policy."""
        folder = self.folder(CRITIC) if self.cfg.rl.rl_type in CRITIC_TYPES else None
        return None if folder is None else model_shape(folder, self.config_of(folder, CRITIC))

    @property
    def uses_reward_model(self) -> bool:
        """Whether rl.reward is a model."""
        return self.cfg.rl.reward == "model" and self.cfg.rl.rl_type in ROLLOUT_TYPES

    @fact
    def reward_parameters(self) -> int:
        """Of the reward model; 0 without one."""
        folder = self.folder(REWARD) if self.uses_reward_model else None
        stored = tensors(folder) if folder else None
        return sum(_product(shape) for _, shape in stored.values()) if stored else 0

    @fact
    def architectures(self) -> Table:
        """What the installed transformers knows."""
        return known_architectures()

    # ---- tokenizer, rows, reward ----

    @property
    def local_cfg(self) -> RunConfig:
        """The settings with the models as folders."""
        changed = {"model_name_or_path": str(self.model)}
        if self.cfg.model.tokenizer_name_or_path:
            changed["tokenizer_name_or_path"] = str(self.tokenizer_folder)
        if self.uses_reward_model:
            changed["reward_model_name_or_path"] = str(self.folder(REWARD))
        model = dataclasses.replace(self.cfg.model, **changed)  # type: ignore[arg-type]
        return dataclasses.replace(self.cfg, model=model)

    @fact
    def tokenizer(self) -> Any:
        """The policy's tokenizer. Raises UserError."""
        return load_tokenizer(self.local_cfg)

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer brings a chat template of its own."""
        return has_own_template(self.tokenizer_folder)

    @fact
    def tokens(self) -> TokenFacts:
        """What matters of the tokenizer."""
        return token_facts(self.tokenizer, self.model, self.model_config)

    @fact
    def training_rows(self) -> RowFacts:
        """The rows, read and checked. Raises UserError."""
        return row_facts(self.local_cfg, self.tokenizer)

    @fact
    def lengths(self) -> Lengths:
        """Of prompts and chosen answers, in tokens."""
        return measure(self.training_rows.samples, self.tokenizer)

    @fact
    def reward(self) -> rewards.Guard:
        """The reward, loaded. Raises UserError."""
        return rewards.build(self.local_cfg)

    # ---- plans ----

    @fact
    def batches(self) -> BatchPlan:
        """The batch arithmetic."""
        return batch_plan(self.cfg, self.training_rows.count)

    def plan_memory(self, cfg: RunConfig) -> MemoryPlan:
        """The memory plan of these or changed settings, with the longest prompt where rows could be read."""
        return self.planner()(cfg)

    def planner(self) -> Callable[[RunConfig], MemoryPlan]:
        """The same for many settings: files are looked at once."""
        if self.shape is None:
            raise Blocked("widths in config.json")
        lengths = self.attempt(lambda: self.lengths)
        return functools.partial(
            memory_plan,
            shape=self.shape,
            critic=self.critic_shape,
            reward_parameters=self.reward_parameters,
            longest_prompt=max(lengths.prompts, default=None) if lengths else None,
        )

    @property
    def card_bytes(self) -> int | None:
        """Memory of the GPU in use; None on a CPU."""
        return self.probe.gpus[0].memory_bytes if self.cfg.training.device == "cuda" else None

    def within_budget(self, choices: Sequence[config.Choice]) -> config.Resolved:
        """The settings changed so that they keep to training.memory_budget_gb. Raises UserError."""
        return fit.fit(self.cfg, choices, self.planner(), self.card_bytes)


def usable_folder(name: str, field: str) -> Path:
    """A model folder that is here and complete. Downloads nothing."""
    found = hub.find_local(name, field)
    if found is None:
        hub.require_hub(name, field)
        raise Blocked(f"model {name}, which the first run downloads")
    faults = check_model_folder(found, field)
    if field == TOKENIZER:  # weights are not asked of it
        faults = []
    if faults:
        raise UserError(faults)
    return found


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
