"""Rewards: a number for an answer. One interface, verl's: (data_source, solution_str, ground_truth, extra_info).

reward = build(cfg)                                  # rl.reward, checked before anything starts
file, name, kwargs = for_verl(cfg, reward)           # what verl's config is told
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from quickstart.arguments import RunConfig
from quickstart.rewards import registry
from quickstart.rewards.guard import Guard, RewardError, Terminal

__all__ = ["Guard", "RewardError", "build", "for_verl"]

ENTRY_FILE = Path(__file__).with_name("entry.py")


def build(cfg: RunConfig, terminal: Terminal = nullcontext) -> Guard:
    """The reward that `rl.reward` names, guarded.

    Args:
        cfg: the settings.
        terminal: a context manager factory, opened around each call of the user's code.

    Raises:
        UserError: the user's function cannot be used.
    """
    return registry.make(registry.specification(cfg), terminal)


def for_verl(cfg: RunConfig, reward: Guard) -> tuple[Path, str, dict[str, Any]]:
    """File, function name and keywords for verl's `reward.custom_reward_function`.

    verl loads the function from the file in whichever process scores: in this one it finds `reward` itself, in
    another it builds the same again from the keywords.
    """
    spec = registry.specification(cfg)
    registry.remember(spec, reward)
    name = "compute_score_async" if reward.is_async else "compute_score"
    return ENTRY_FILE, name, {registry.KEYWORD: spec}
