"""The file that verl loads as `reward.custom_reward_function.path`, in whichever process scores answers.

Not here: any reward. The keyword `quickstart_reward` says which one (verl passes reward_kwargs to each call).
"""

from __future__ import annotations

from typing import Any

from quickstart.rewards.registry import recall


def compute_score(quickstart_reward: dict[str, Any], **kwargs: Any) -> Any:
    """verl's call, passed on to the reward that is meant."""
    return recall(quickstart_reward)(**kwargs)


async def compute_score_async(quickstart_reward: dict[str, Any], **kwargs: Any) -> Any:
    """The same for a reward that is a coroutine function; verl chooses by the kind of this one."""
    return await recall(quickstart_reward).call_async(**kwargs)
