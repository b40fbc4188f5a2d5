"""From a reward's description (plain values that fit into verl's config) to the reward, once per process.

Not here: the rewards themselves.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

from quickstart.arguments import RunConfig
from quickstart.rewards import builtin, function, preference
from quickstart.rewards.guard import Guard, Terminal
from quickstart.rewards.model import ModelReward, ModelSettings

KEYWORD = "quickstart_reward"  # the keyword under which verl hands the description back at each call
Specification = dict[str, Any]

_made: dict[str, Guard] = {}  # description as JSON -> the reward of this process


def specification(cfg: RunConfig) -> Specification:
    """All that is needed to build the reward in another process."""
    reward = cfg.rl.reward
    if reward.startswith("function:"):
        file, name = function.split(reward)
        reward = f"function:{file.absolute()}:{name}"  # workers of a cluster have another current folder
    if reward == "model":
        return {"reward": reward, "model": asdict(_model_settings(cfg))}
    return {"reward": reward}


def _model_settings(cfg: RunConfig) -> ModelSettings:
    model = cfg.model
    assert model.reward_model_name_or_path is not None, "the config refuses rl.reward=model without one"
    return ModelSettings(
        path=model.reward_model_name_or_path,
        dtype=model.torch_dtype,
        device=cfg.training.device,
        offload=cfg.rl.reward_offload == "cpu",
        use_flash_attention_2=model.reward_use_flash_attention_2,
        trust_remote_code=model.trust_remote_code,
    )


def make(spec: Specification, terminal: Terminal = nullcontext) -> Guard:
    """Build a reward. Raises UserError."""
    reward = spec["reward"]
    if reward == "preference":
        return Guard(score=preference.compute_score, name=reward)
    if reward == "verl":
        return Guard(score=builtin.compute_score, name=reward)
    if reward == "model":
        model = ModelReward(settings=ModelSettings(**spec["model"]))
        return Guard(score=model.compute_score, name=reward, load=model.load)
    score, file = function.load(reward)
    return Guard(score=score, name=reward, user_file=file, terminal=terminal)


def remember(spec: Specification, reward: Guard) -> None:
    """This process uses this object for this description."""
    _made[_key(spec)] = reward


def recall(spec: Specification) -> Guard:
    """The reward of a description, built where this process has none yet."""
    key = _key(spec)
    if key not in _made:
        _made[key] = make(spec)
    return _made[key]


def _key(spec: Specification) -> str:
    return json.dumps(spec, sort_keys=True, default=dict)  # from verl it comes as OmegaConf's mappings
