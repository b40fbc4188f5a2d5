"""What stock verl needs to run on a CPU with Ray, for making the reference of the parity test. Nothing of ours in it.

verl imports this module in every Ray process (VERL_USE_EXTERNAL_MODULES). It registers a CPU engine, a value-head
loader and a rollout server that gives fixed answers. quickstart's own shims stay out: the reference is FSDP2 with its
sharding calls, verl's log-prob loop and its offloaded reference model, against which the local backend is held.
"""

from __future__ import annotations

import functools
from typing import Any

import ray
import ray_case
import verl.utils.distributed
import verl.utils.model
from verl.utils import fsdp_utils
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

SERVER = "fixed_server_{rank}_0"


@ray.remote(num_cpus=0)
class FixedServer:
    """A rollout server without a model."""

    def __init__(self, config: Any, model_config: Any) -> None:
        self._longest = omega_conf_to_dataclass(config).response_length
        self._answers = ray_case.FixedAnswers(omega_conf_to_dataclass(model_config).tokenizer.eos_token_id)
        self._steps: int | None = None

    async def generate(self, request_id: str, prompt_ids: list[int], sampling_params: Any, **_: Any) -> TokenOutput:
        ids, log_probs = self._answers(prompt_ids, self._longest)
        return TokenOutput(
            token_ids=ids, log_probs=log_probs, stop_reason="completed", extra_fields={"global_steps": self._steps}
        )

    async def set_global_steps(self, steps: int) -> None:
        self._steps = steps

    async def wake_up(self, tags: list[str] | None = None) -> None: ...
    async def sleep(self) -> None: ...
    async def clear_kv_cache(self) -> None: ...
    async def abort_all_requests(self, reject_request: bool = False) -> None: ...
    async def resume_generation(self) -> None: ...


class FixedReplica(RolloutReplica):
    """Starts the server."""

    async def launch_servers(self) -> None:
        self._server_address = SERVER.format(rank=self.replica_rank)
        options = FixedServer.options(name=self._server_address, max_concurrency=1000)
        self._server_handle = options.remote(self.config, self.model_config)
        self.servers = [self._server_handle]


class FixedRollout(BaseRollout):
    """The worker's side: reads the weights that are sent, as an engine would, and passes the version on."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)

    async def resume(self, tags: list[str]) -> None: ...
    async def release(self) -> None: ...

    async def update_weights(self, weights: Any, global_steps: int | None = None, **_: Any) -> None:
        for _name, _value in weights:
            pass
        await ray.get_actor(SERVER.format(rank=0)).set_global_steps.remote(global_steps)


def register() -> None:
    """Every change to verl that a CPU needs; see ../../quickstart/plugin for the reasons."""
    _ROLLOUT_REGISTRY[("hf", "async")] = "ray_stock.FixedRollout"
    RolloutReplicaRegistry.register("hf", lambda: FixedReplica)
    start = verl.utils.distributed.initialize_global_process_group_ray
    verl.utils.distributed.initialize_global_process_group_ray = functools.partial(start, backend="gloo")
    policy = fsdp_utils.CPUOffloadPolicy
    fsdp_utils.CPUOffloadPolicy = lambda pin_memory=True: policy(pin_memory=False)
    verl.utils.model.load_valuehead_model = load_value_head


def load_value_head(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
    """As verl's, with an attention that a CPU has."""
    from transformers import AutoModelForTokenClassification

    return AutoModelForTokenClassification.from_pretrained(
        local_path, dtype=torch_dtype, config=model_config, attn_implementation="sdpa"
    )


register()
