"""Ray's objects as plain ones: what verl's trainer calls a worker group, a future or a manager, in this process.

verl's PPOTrainer builds and drives everything through a handful of names in its own module (`ray`, `RayWorkerGroup`,
`tq` ...). :func:`in_process` puts these stand-ins under those names while a local run lives, so that not one method of
the trainer has to be copied: `_setup`, `step`, advantages, metrics, validation and checkpoints stay verl's text. Each
stand-in has only what the synchronous trainer calls; a new call in another verl is an AttributeError, not a guess.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop import agent_loop
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker
from verl.trainer.ppo import padding_utils
from verl.trainer.ppo.v1 import agent_loop_tq, replay_buffer, trainer_base
from verl.utils import tensordict_utils as tu

from quickstart.plugin.agent_loop import PLAIN_HYDRA, LocalLoop, outer_loop_set_aside
from quickstart.plugin.shims import Shim, replace_names
from quickstart.plugin.store import MemoryStore


class Done:
    """A call that has already returned, where verl expects a future (trainer_base.py:1732 and :1819)."""

    def __init__(self, value: Any) -> None:
        self.futures = self.value = value

    def get(self) -> Any:
        """The result."""
        return self.value


class LocalRay:
    """The two calls of `ray` that the synchronous trainer makes."""

    @staticmethod
    def remote(cls: type) -> type:
        """`ray.remote(Worker)`: the class stays a class."""
        return cls

    @staticmethod
    def get(value: Any) -> Any:
        """`ray.get(output.futures)` of a call that is done."""
        return value


# Columns that no worker reads: the trainer's own, and those that only the other model's update is about.
SCORES = ("rm_scores", "token_level_scores", "token_level_rewards", "entropy", "log_probs", "rollout_log_probs")
UNREAD = {
    "update_actor": (*SCORES, "values", "returns"),
    "train_mini_batch": (*SCORES, "old_log_probs", "ref_log_prob", "advantages", "rollout_is_weights"),  # the critic's
    "compute_log_prob": (*SCORES, "old_log_probs", "ref_log_prob"),
    "compute_ref_log_prob": (*SCORES, "old_log_probs"),
    "infer_batch": (*SCORES, "old_log_probs", "ref_log_prob"),  # the critic's values
}

# What loading takes place in which call of verl's `_setup`, for the console.
LOADING = {"reset": "critic", "init_model": "actor, reference and rollout engine"}


class WorkerHandle:
    """One verl worker, called directly, with the calling convention of a RayWorkerGroup.

    verl's dispatch (single_controller/base/decorator.py, utils/transferqueue_utils.py) turns a batch's keys into its
    rows before a worker's method runs and writes the result back: done here for one worker. Methods that verl calls
    without waiting (`blocking=False`) give a :class:`Done`, unless they store their result.
    """

    def __init__(self, worker: Any, store: MemoryStore, loop: LocalLoop, tell: Callable[[str], None]) -> None:
        self.worker = worker
        self._store, self._loop, self._tell = store, loop, tell
        self._dispatch_info: dict[str, Any] = {}

    def _query_dispatch_info(self, mesh: str) -> list[int]:
        return [self.worker._query_dispatch_info(mesh)]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, getattr(self.worker, name))

    def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if method.__name__ in LOADING:
            self._tell(LOADING[method.__name__])
        keys = args[0] if args and isinstance(args[0], KVBatchMeta) else None
        if keys is not None:
            args = (self._rows_of(keys, UNREAD[method.__name__]), *args[1:])
        result = method(*args, **kwargs)
        if inspect.iscoroutine(result):
            result = self._loop.run(result)
        if keys is None or not isinstance(result, TensorDict):
            return result
        if result.batch_size:
            columns = [name for name, value in result.items() if isinstance(value, torch.Tensor | NonTensorStack)]
            stored = self._store.kv_batch_put(keys.keys, keys.partition_id, result.select(*columns))
            return _with_futures(stored)
        # train_mini_batch is the one result without rows that verl awaits (`.get()`); update_actor is read directly
        return Done(result) if method.__name__ == "train_mini_batch" else result

    def _rows_of(self, keys: KVBatchMeta, unread: tuple[str, ...]) -> TensorDict:
        rows = self._store.tensors(keys.keys, keys.partition_id, without=unread)
        for name, value in keys.extra_info.items():
            tu.assign_non_tensor_data(rows, name, value)
        return rows


def _with_futures(stored: KVBatchMeta) -> KVBatchMeta:
    """`ray.get(output.futures)` follows an infer_batch (trainer_base.py:1732): the rows are stored already."""
    stored.futures = None
    return stored


class LocalResourcePools:
    """One device, one pool. Stands for ResourcePoolManager, whose check asks a Ray cluster (ray/base.py:233)."""

    def __init__(self, resource_pool_spec: dict[str, list[int]], mapping: dict[Any, str]) -> None:
        self._devices = sum(sum(nodes) for nodes in resource_pool_spec.values())
        self._mapping = mapping
        self.resource_pool_dict = {name: name for name in resource_pool_spec}

    def create_resource_pool(self) -> None:
        """Nothing to reserve."""

    def get_resource_pool(self, role: Any) -> str:
        """The pool's name is the pool."""
        return self.resource_pool_dict[self._mapping[role]]

    def get_n_gpus(self) -> int:
        """Devices that throughput is divided by."""
        return self._devices


class LocalRun:
    """What one local run's stand-ins share: the store, the event loop, and the objects as they come to life."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.store = MemoryStore()
        self.loop = LocalLoop()
        self.tell = tell  # told what is being loaded
        self.actor: WorkerHandle | None = None
        self.reward_handles: list[Any] = []

    @property
    def rollout(self) -> Any:
        """The rollout engine that verl's actor worker built (engine_workers.py:668)."""
        assert self.actor is not None, "the actor is built by PPOTrainer._setup"
        return self.actor.worker.rollout

    def worker_group(self, resource_pool: Any, ray_cls_with_init: dict[str, Any], **_: Any) -> Any:
        """Stands for RayWorkerGroup: `spawn` makes one worker a role."""

        def spawn(prefix_set: Any) -> dict[str, WorkerHandle]:
            return {role: self._worker(role, ray_cls_with_init[role]) for role in prefix_set}

        return SimpleNamespace(spawn=spawn)

    def _worker(self, role: str, recipe: Any) -> WorkerHandle:
        handle = WorkerHandle(recipe.cls(*recipe.args, **recipe.kwargs), self.store, self.loop, self.tell)
        if role.startswith("actor"):
            self.actor = handle
        return handle

    def reward_manager(self, config: Any, rm_resource_pool: Any) -> Any:
        """Stands for RewardLoopManager: one of verl's reward workers, answering at once."""
        worker = RewardLoopWorker(config)
        self.reward_handles = [SimpleNamespace(compute_score=SimpleNamespace(remote=worker.compute_score))]
        return SimpleNamespace(reward_loop_worker_handles=self.reward_handles)

    def server_manager(self) -> Any:
        """Stands for LLMServerManager: the engine lives in the actor's worker, there is no server."""
        nothing = SimpleNamespace(
            get_client=lambda: self.rollout, get_replicas=list, start_profile=lambda: None, stop_profile=lambda: None
        )
        return SimpleNamespace(create=lambda **_: nothing)

    def checkpoint_manager(self, config: Any, actor_wg: Any, replicas: Any) -> Any:
        """Stands for CheckpointEngineManager: weights go from the actor to the rollout in this process."""
        return SimpleNamespace(
            update_weights=lambda step=None: actor_wg.update_weights(global_steps=step, mode="naive"),
            sleep_replicas=lambda: self.loop.run(self.rollout.release()),
        )

    def stand_ins(self) -> list[Shim]:
        """Every name that is replaced, with the place in verl that uses it."""
        base = "verl/trainer/ppo/v1/trainer_base.py"

        def of(module: Any, name: str, replacement: Any, why: str, where: str) -> Shim:
            return Shim(module=module, name=name, replacement=replacement, why=why, where=where)

        queue = "rows are kept in this process, not in TransferQueue's actors"
        return [
            of(trainer_base, "tq", self.store, queue, f"{base}:30"),
            of(replay_buffer, "tq", self.store, queue, "verl/trainer/ppo/v1/replay_buffer.py:20"),
            of(agent_loop_tq, "tq", self.store, queue, "verl/trainer/ppo/v1/agent_loop_tq.py:25"),
            of(padding_utils, "tq", self.store, queue, "verl/trainer/ppo/padding_utils.py:32"),
            of(
                agent_loop,
                "hydra",
                PLAIN_HYDRA,
                "2 ms a conversation",
                "verl/experimental/agent_loop/agent_loop.py:683",
            ),
            of(trainer_base, "ray", LocalRay, "ray.get can start a cluster", f"{base}:805,813,1732"),
            of(trainer_base, "ResourcePoolManager", LocalResourcePools, "asks the cluster", f"{base}:848"),
            of(trainer_base, "RayWorkerGroup", self.worker_group, "workers are objects here", f"{base}:307"),
            of(trainer_base, "create_colocated_worker_cls", _same_recipes, "one process as it is", f"{base}:306"),
            of(trainer_base, "RewardLoopManager", self.reward_manager, "starts actors", f"{base}:343"),
            of(trainer_base, "LLMServerManager", self.server_manager(), "starts servers", f"{base}:369"),
            of(trainer_base, "CheckpointEngineManager", self.checkpoint_manager, "talks to servers", f"{base}:380"),
        ]


def _same_recipes(class_dict: dict[str, Any]) -> dict[str, Any]:
    """verl fuses the workers of a pool into one actor class; here each stays itself."""
    return class_dict


@contextlib.contextmanager
def in_process(tell: Callable[[str], None] = lambda _: None) -> Iterator[LocalRun]:
    """verl's trainer module with the stand-ins in place; put back at the end, also after an error.

    Args:
        tell: told what is being loaded, while the trainer is set up.
    """
    with outer_loop_set_aside():
        run = LocalRun(tell)
        undo = replace_names(run.stand_ins())
        try:
            yield run
        finally:
            undo()
            run.loop.close()
