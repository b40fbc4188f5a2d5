"""Ray's objects as plain ones: what verl's trainer asks of a worker group, a pool or a manager, and no more."""

import ast
import inspect
import types

import pytest
import torch
import verl_text
from tensordict import NonTensorData, NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import trainer_base, trainer_sync
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from quickstart.plugin import local
from quickstart.plugin.agent_loop import LocalAgentLoopManager, LocalLoop
from quickstart.plugin.local import Done, LocalRay, LocalResourcePools, LocalRun, WorkerHandle
from quickstart.plugin.store import MemoryStore

BASE = verl_text.tree(trainer_base)
TRAINER = ast.parse(inspect.getsource(trainer_base.PPOTrainer))
SYNC = ast.parse(inspect.getsource(trainer_sync))


def used(owner):
    """Every attribute of `owner` that verl's synchronous trainer reads."""
    return verl_text.attributes(TRAINER, owner) | verl_text.attributes(SYNC, owner)


class TestWhatTheTrainerUses:
    def test_of_ray(self):
        """`ray.actor` stands in an annotation, which was read when the class was made."""
        assert verl_text.attributes(BASE, "ray") == {"get", "remote", "actor"}
        annotations = [ast.unparse(n.returns) for n in ast.walk(BASE) if isinstance(n, ast.FunctionDef) and n.returns]
        assert sum("ray.actor" in text for text in annotations) == ast.unparse(BASE).count("ray.actor.")
        for name in ("get", "remote"):
            for call in verl_text.calls(BASE, f"ray.{name}"):
                verl_text.binds(call, getattr(LocalRay, name))

    def test_waits_for_two_results_only(self):
        assert [ast.unparse(c) for c in verl_text.calls(BASE, "ray.get")] == ["ray.get(output.futures)"]
        assert [ast.unparse(c) for c in verl_text.calls(BASE, "output.get")] == ["output.get()"]

    def test_of_the_pools(self):
        assert used("self.resource_pool_manager") <= set(dir(LocalResourcePools({"p": [1]}, {})))

    def test_of_the_checkpoint_manager(self):
        manager = LocalRun(lambda _: None).checkpoint_manager(None, None, None)
        assert used("self.checkpoint_manager") == set(vars(manager))

    def test_of_the_servers(self):
        made = LocalRun(lambda _: None).server_manager().create(config=None, worker_group=None)
        assert used("self.llm_server_manager") <= set(vars(made))

    def test_of_the_reward_manager(self):
        """compute_rm_score is called where there are no handles (a reward model on the same devices)."""
        assert used("self.reward_loop_manager") == {"reward_loop_worker_handles", "compute_rm_score"}
        step = inspect.getsource(trainer_base.PPOTrainer._step_once)
        assert "if self.reward_loop_manager.reward_loop_worker_handles is None:" in step

    @pytest.mark.parametrize(
        ("group", "worker"),
        [
            ("self.actor_rollout_wg", ActorRolloutRefWorker),
            ("self.ref_policy_wg", ActorRolloutRefWorker),
            ("self.critic_wg", TrainingWorker),
        ],
    )
    def test_of_the_workers(self, group, worker):
        names = used(group) - {"_dispatch_info"}
        assert names
        for name in names:
            assert callable(getattr(worker, name)), name

    def test_of_the_agent_loop_manager(self):
        assert used("self.agent_loop_manager") == {"generate_sequences"}
        assert callable(LocalAgentLoopManager.generate_sequences)


class FakeWorker:
    """Stands for a verl worker: says what it got."""

    def __init__(self):
        self.got = []

    def _query_dispatch_info(self, mesh):
        return {"actor": 3}[mesh]

    def infer_batch(self, data):
        self.got.append(data)
        columns = {"log_probs": data["ids"], "kept": NonTensorStack("x", "y"), "shared": NonTensorData(1)}
        return TensorDict(columns, batch_size=len(data))

    def train_mini_batch(self, data):
        self.got.append(data)
        return TensorDict({"metrics": NonTensorData({"loss": 1.0})}, batch_size=[])

    def update_actor(self, data):
        return TensorDict({"metrics": NonTensorData({"loss": 2.0})}, batch_size=[])

    async def update_weights(self, global_steps, mode):
        return (global_steps, mode)

    def reset(self):
        return "reset"


@pytest.fixture
def setting():
    store, loop, told = MemoryStore(), LocalLoop(), []
    ids = torch.nested.as_nested_tensor([torch.tensor([1, 2]), torch.tensor([3])], layout=torch.jagged)
    columns = {"ids": ids, "uid": NonTensorStack("u", "v"), "reward": torch.tensor([0.5, 1.0])}
    store.kv_batch_put(["a", "b"], "train", TensorDict(columns, batch_size=2))
    worker = FakeWorker()
    yield types.SimpleNamespace(
        store=store, told=told, worker=worker, handle=WorkerHandle(worker, store, loop, told.append)
    )
    loop.close()


def meta(**extra):
    return KVBatchMeta(keys=["b", "a"], tags=[{}, {}], partition_id="train", extra_info=extra)


class TestWorkerHandle:
    def test_keys_become_rows_in_their_order_with_the_batchs_facts(self, setting):
        setting.handle.infer_batch(meta(temperature=0.7))
        (rows,) = setting.worker.got
        assert [row.tolist() for row in rows["ids"].unbind()] == [[3], [1, 2]]
        assert rows["reward"].tolist() == [1.0, 0.5]
        assert rows["temperature"] == 0.7
        assert "uid" not in rows  # no worker reads columns of Python objects

    def test_results_with_rows_go_to_the_store(self, setting):
        stored = setting.handle.infer_batch(meta())
        assert stored.keys == ["b", "a"]
        got = setting.store.kv_batch_get(["a", "b"], "train", ["log_probs", "kept", "shared"])
        assert [row.tolist() for row in got["log_probs"].unbind()] == [[1, 2], [3]]
        assert list(got["kept"]) == ["y", "x"]
        assert "shared" not in got

    def test_a_stored_result_can_be_waited_for(self, setting):
        """As verl does: ray.get(output.futures)."""
        assert LocalRay.get(setting.handle.infer_batch(meta()).futures) is None

    def test_the_critics_update_is_a_future_and_the_actors_is_not(self, setting):
        done = setting.handle.train_mini_batch(meta())
        assert isinstance(done, Done)
        assert done.get()["metrics"] == {"loss": 1.0}
        assert setting.handle.update_actor(meta())["metrics"] == {"loss": 2.0}

    def test_coroutines_run_to_their_end(self, setting):
        assert setting.handle.update_weights(global_steps=4, mode="naive") == (4, "naive")

    def test_dispatch_info_is_a_list_over_workers(self, setting):
        assert setting.handle._query_dispatch_info("actor") == [3]
        assert setting.handle._dispatch_info == {}

    def test_says_what_is_being_loaded(self, setting):
        assert setting.handle.reset() == "reset"
        setting.handle.update_actor(meta())
        assert setting.told == ["critic"]

    def test_a_method_that_no_worker_has_is_an_error(self, setting):
        with pytest.raises(AttributeError, match="compute_everything"):
            _ = setting.handle.compute_everything


class TestPools:
    def test_devices_are_counted_over_all_pools(self):
        pools = LocalResourcePools(resource_pool_spec={"global": [2, 2], "reward": [1]}, mapping={"actor": "global"})
        pools.create_resource_pool()
        assert pools.get_n_gpus() == 5
        assert pools.get_resource_pool("actor") in pools.resource_pool_dict.values()


class TestRun:
    def test_workers_are_made_by_role_and_the_actor_is_remembered(self):
        def recipe(**kwargs):
            return types.SimpleNamespace(cls=types.SimpleNamespace, args=(), kwargs=kwargs)

        run = LocalRun(lambda _: None)
        recipes = {"actor_rollout_ref": recipe(rollout="engine"), "critic": recipe(size=1)}
        group = run.worker_group(resource_pool="p", ray_cls_with_init=recipes, device_name="cpu")
        made = group.spawn(prefix_set=recipes.keys())
        assert made["critic"].worker.size == 1
        assert run.rollout == "engine"

    def test_the_rollout_before_the_actor_is_our_bug(self):
        with pytest.raises(AssertionError, match="_setup"):
            _ = LocalRun(lambda _: None).rollout

    def test_two_runs_share_nothing(self):
        with local.in_process() as first:
            first.store.kv_put("k", "train", tag={"a": 1})
        with local.in_process() as second:
            assert second.store.kv_list() == {}
            assert trainer_base.tq is second.store
