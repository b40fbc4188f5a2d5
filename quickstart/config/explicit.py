"""Which settings somebody chose, and which stand as they came and may be chosen for the user."""

from __future__ import annotations

from quickstart.arguments import RunConfig
from quickstart.config.rules import value_of

BATCH = ("rl.per_device_train_batch_size", "rl.gradient_accumulation_steps")
# The two together as they come: built in, in configs/ppo_min.yaml, in its profile `cpu`. tests/test_doctor_fit.py.
SHIPPED_BATCHES = ((4, 1), (4, 5), (20, 1))
# What configs/ppo_min.yaml sets to another value than the built-in one and not every method reads.
SHIPPED = {"rl.critic_learning_rate": 1e-3}


def is_explicit(cfg: RunConfig, key: str) -> bool:
    """Whether somebody chose the value of `section.key`.

    On the command line and from Python everything is chosen. A file such as configs/ppo_min.yaml writes every setting
    down: there null is no choice, and neither is a value as it comes with this project.
    """
    source = cfg.source
    if is_typed(cfg, key):
        return True
    if key not in source.given or source.config_path is None:
        return key in source.given
    if key in BATCH:
        return tuple(value_of(cfg, name) for name in BATCH) not in SHIPPED_BATCHES
    return value_of(cfg, key) is not None and value_of(cfg, key) != SHIPPED.get(key)


def is_typed(cfg: RunConfig, key: str) -> bool:
    """Whether the command line has `section.key`."""
    return key in {text.partition("=")[0].strip() for text in cfg.source.overrides}
