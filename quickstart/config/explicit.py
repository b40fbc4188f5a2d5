"""Which settings somebody chose, and which stand as they came and may be chosen for the user."""

from __future__ import annotations

from quickstart.arguments import RunConfig
from quickstart.config.rules import value_of

BATCH = ("rl.per_device_train_batch_size", "rl.gradient_accumulation_steps")
# The two together as they come: built in, in configs/ppo_min.yaml, in its profile `cpu`. tests/test_doctor_fit.py.
SHIPPED_BATCHES = ((4, 1), (4, 5), (20, 1))


def is_explicit(cfg: RunConfig, key: str) -> bool:
    """Whether somebody chose the value of `section.key`.

    On the command line and from Python everything is chosen. A file such as configs/ppo_min.yaml writes every setting
    down: there null is no choice, and neither are the two batch settings as they come with this project.
    """
    source = cfg.source
    if key in {text.partition("=")[0].strip() for text in source.overrides}:
        return True
    if key not in source.given or source.config_path is None:
        return key in source.given
    if key in BATCH:
        return tuple(value_of(cfg, name) for name in BATCH) not in SHIPPED_BATCHES
    return value_of(cfg, key) is not None
