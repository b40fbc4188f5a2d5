"""verl's configuration of a preference run: the short way to it gives what the long way gives."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("verl")

import preference_runs as runs

from quickstart import verl_compose, verl_config
from quickstart.errors import UserError


def test_the_short_way_equals_the_long_way(tiny_tied: Path, tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    cfg = runs.settings(tiny_tied, "dpo", tmp_path)
    keys = verl_config.translate_preference(cfg, chat_template=None, steps=7)
    short = verl_compose.compose_preference(keys, {}).actor_rollout_ref
    whole = verl_compose.compose(keys, {}).actor_rollout_ref
    for part in ("actor", "model"):
        wanted = OmegaConf.to_container(whole[part])
        wanted.pop("profiler", None)
        assert OmegaConf.to_container(short[part]) == wanted
    assert short.actor.optim.total_training_steps == 7
    assert short.actor.strategy == "fsdp2"


def test_keys_of_the_user_count_and_are_checked(tiny_tied: Path, tmp_path: Path) -> None:
    cfg = runs.settings(tiny_tied, "dpo", tmp_path)
    keys = verl_config.translate_preference(cfg, chat_template=None, steps=7)
    whole = verl_compose.compose_preference(keys, {"actor_rollout_ref.actor.optim.betas": [0.8, 0.9]})
    assert whole.actor_rollout_ref.actor.optim.betas == [0.8, 0.9]
    with pytest.raises(UserError, match="not in verl"):
        verl_compose.compose_preference(keys, {"actor_rollout_ref.actor.optim.beta": 1})
