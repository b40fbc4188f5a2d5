"""A reward that a test can steer and look into: `BEHAVE` is called for each answer. verl loads this file by its path.

verl executes a copy of the file; the state is therefore kept in the module that Python's own import makes.
"""

import importlib

BEHAVE = None  # called with the answer's text; returns the reward
CALLS = 0


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """Whatever BEHAVE says."""
    shared = importlib.import_module("reward_probe")
    shared.CALLS += 1
    return shared.BEHAVE(solution_str)


async def compute_score_async(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """The same as a coroutine."""
    import asyncio

    await asyncio.sleep(0.001)
    return compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs)
