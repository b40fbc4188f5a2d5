"""From a reward's description (plain values that fit into verl's config) to the reward, once per process.

Not here: the rewards themselves.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

from quickstart.arguments import RunConfig
from quickstart.rewards import builtin, function, preference
from quickstart.rewards.guard import Guard, Terminal

KEYWORD = "quickstart_reward"  # the keyword under which verl hands the description back at each call
Specification = dict[str, Any]

_made: dict[str, Guard] = {}  # description as JSON -> the reward of this process


def specification(cfg: RunConfig) -> Specification:
    """All that is needed to build the reward in another process."""
    reward = cfg.rl.reward
    if reward.startswith("function:"):
        file, name = function.split(reward)
        reward = f"function:{file.absolute()}:{name}"  # workers of a cluster have another current folder
    return {"reward": reward}


def make(spec: Specification, terminal: Terminal = nullcontext) -> Guard:
    """Build a reward. Raises UserError."""
    reward = spec["reward"]
    if reward == "preference":
        return Guard(score=preference.compute_score, name=reward)
    if reward == "verl":
        return Guard(score=builtin.compute_score, name=reward)
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
    return json.dumps(dict(spec), sort_keys=True)
