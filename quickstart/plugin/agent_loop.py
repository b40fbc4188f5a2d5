"""verl's agent loop (prompt -> tokens -> answer -> reward -> store) in this process, without Ray actors.

The worker is verl's own class (trainer/ppo/v1/agent_loop_tq.py:50), taken out of its `@ray.remote` wrapper; chat
templates, custom agent loops and scoring are therefore verl's. What differs: an error in one conversation ends the run
with that error, while verl logs it and goes on with what is left (agent_loop_tq.py:138-149).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import hydra
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

_VerlWorker = AgentLoopWorkerTQ.__ray_metadata__.modified_class


class InlineExecutor(ThreadPoolExecutor):
    """Runs what it is given at once, in the caller's thread.

    verl hands templates and reward functions to the event loop's executor (reward_manager/naive.py:77). In the main
    thread a breakpoint and Ctrl-C work inside the user's reward, and the order of calls is the same in every run.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


@contextlib.contextmanager
def outer_loop_set_aside() -> Iterator[None]:
    """In a notebook the kernel's event loop is running in this thread: set it aside for as long as a run lives.

    Not only while ours runs: verl's reward manager takes the running loop when it is made (reward_manager/base.py:47).
    """
    outer = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(outer)
        asyncio.set_event_loop(outer)


def instantiate(config: dict[str, Any] | DictConfig, **kwargs: Any) -> Any:
    """hydra.utils.instantiate for the plain case, a class and its arguments; anything else is hydra's.

    verl makes an agent loop for each conversation (agent_loop.py:685), and hydra takes 2 ms to look at a dictionary
    with one entry.
    """
    if set(config) == {"_target_"}:
        return hydra.utils.get_class(config["_target_"])(**kwargs)
    return hydra.utils.instantiate(config=config, **kwargs)


PLAIN_HYDRA = SimpleNamespace(utils=SimpleNamespace(instantiate=instantiate))


class LocalLoop:
    """The one event loop of a run; coroutines run to their end. Lives inside :func:`outer_loop_set_aside`."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(InlineExecutor(max_workers=1))
        asyncio.set_event_loop(self.loop)  # verl's get_event_loop() looks here (utils/ray_utils.py)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """The coroutine's result."""
        return self.loop.run_until_complete(coroutine)

    def close(self) -> None:
        """Drop what an interrupted run left behind."""
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()
        asyncio.set_event_loop(None)


class _Worker(_VerlWorker):  # type: ignore[misc, valid-type]  # a class taken out of Ray's wrapper
    """verl's agent loop worker, counting open conversations and remembering the first error."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.open = 0
        self.first_error: Exception | None = None

    async def _run_agent_loop(self, *args: Any, **kwargs: Any) -> None:
        try:
            await super()._run_agent_loop(*args, **kwargs)
        except Exception as error:
            self.first_error = self.first_error or error
            raise
        finally:
            self.open -= 1

    async def generate_and_wait(self, batch: TensorDict, conversations: int) -> None:
        """verl's generate_sequences starts tasks and returns; wait for them, then raise what went wrong."""
        self.open, self.first_error = conversations, None
        await self.generate_sequences(batch)
        await asyncio.gather(*self.background_tasks)
        if self.first_error is not None:
            raise self.first_error


class LocalAgentLoopManager:
    """Stands for verl's AgentLoopManagerTQ: one worker, called directly.

    Args:
        config: verl's whole config.
        rollout: the engine; told which step begins and how many requests to wait for.
        reward_handles: verl RewardLoopWorkers, wrapped as local handles.
        loop: the run's event loop.
    """

    def __init__(self, config: Any, rollout: Any, reward_handles: list[Any], loop: LocalLoop) -> None:
        self._loop = loop
        self._rollout, self._rollout_config = rollout, config.actor_rollout_ref.rollout
        self._worker = _Worker(config=config, llm_client=rollout, reward_loop_worker_handles=reward_handles)
        rollout.expected = lambda: self._worker.open

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Generate, score and store every conversation of `prompts`; returns when all are in the store."""
        validate = "validate" in prompts and bool(prompts["validate"])
        answers = self._rollout_config.val_kwargs.n if validate else self._rollout_config.n
        self._rollout.begin(int(prompts["global_steps"]), int(validate))
        self._loop.run(self._worker.generate_and_wait(prompts, len(prompts) * answers))
