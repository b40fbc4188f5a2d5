"""Every replaced name of verl, held to verl's text: the name is there, the reason is there, the calls still fit."""

import ast
import inspect
import re
from importlib import metadata

import pytest
import torch
import verl_text

from quickstart.errors import UserError
from quickstart.plugin import SUPPORTED_VERL, local, shims
from quickstart.trainers import ppo


def fit_shims(monkeypatch):
    """What `ppo.fit` replaces, caught before it does."""
    caught = []

    class CaughtError(Exception):
        pass

    def catch(given):
        caught.extend(given)
        raise CaughtError

    monkeypatch.setattr(ppo, "replace_names", catch)
    trainer = ppo.LocalPPOTrainer.__new__(ppo.LocalPPOTrainer)
    trainer._run = None
    with pytest.raises(CaughtError):
        ppo.fit(trainer)
    return caught


def every_shim():
    """Shims of a CPU run, and the stand-ins of a local one."""
    with pytest.MonkeyPatch.context() as patch:
        return shims.shims_for("cpu") + local.LocalRun(lambda _: None).stand_ins() + fit_shims(patch)


SHIMS = every_shim()
IDS = [f"{shim.module.__name__.rpartition('.')[2]}.{shim.name}" for shim in SHIMS]


def code_of(shim):
    """Source of what verl has under the shim's name."""
    return inspect.getsource(getattr(shim.module, shim.name))


def source(path):
    """Source of `verl.a.b:Class.method`."""
    module, _, rest = path.partition(":")
    value = __import__(module, fromlist=["_"])
    for part in rest.split("."):
        value = getattr(value, part)
    return inspect.getsource(value)


class TestEachShim:
    @pytest.mark.parametrize("shim", SHIMS, ids=IDS)
    def test_its_module_has_the_name(self, shim):
        assert shim.name in vars(shim.module)

    @pytest.mark.parametrize("shim", SHIMS, ids=IDS)
    def test_the_name_stands_near_each_line_it_cites(self, shim):
        for text in verl_text.lines_near(shim.where):
            assert re.search(rf"\b{shim.name}\b", text), shim.where

    @pytest.mark.parametrize("shim", SHIMS, ids=IDS)
    def test_says_why(self, shim):
        assert len(shim.why) > 8

    @pytest.mark.parametrize("shim", SHIMS, ids=IDS)
    def test_takes_every_call_that_its_module_makes(self, shim):
        for call in verl_text.calls(verl_text.tree(shim.module), shim.name):
            verl_text.binds(call, shim.replacement)

    def test_no_name_is_replaced_twice(self):
        assert len({(shim.module.__name__, shim.name) for shim in SHIMS}) == len(SHIMS)


SAME_SIGNATURE = [
    "load_valuehead_model",
    "logprobs_from_logits_v2",
    "apply_fsdp2",
    "fsdp2_load_full_state_dict",
    "fsdp_merge_unmerge",
    "get_init_weight_context_manager",
]


class TestSignatures:
    @pytest.mark.parametrize("name", SAME_SIGNATURE)
    def test_same_names_order_and_defaults_as_verls(self, name):
        shim = next(s for s in SHIMS if s.name == name)
        ours, verls = (inspect.signature(f).parameters for f in (shim.replacement, getattr(shim.module, name)))
        assert list(ours) == list(verls)
        assert [p.default for p in ours.values()] == [p.default for p in verls.values()]

    def test_offload_policy_takes_what_fsdp2s_does(self):
        from torch.distributed.fsdp import CPUOffloadPolicy

        ours, torchs = (inspect.signature(f).parameters for f in (shims.no_offload_policy, CPUOffloadPolicy))
        assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in torchs.values()]


BUILD = "verl.workers.engine.fsdp.transformer_impl:FSDPEngine._build_fsdp_module"
TRAINER = "verl.trainer.ppo.v1.trainer_base:PPOTrainer"
REASONS = [
    ("verl.utils.model:load_valuehead_model", 'attn_implementation="flash_attention_2"'),
    ("verl.utils.model:load_valuehead_model", "is_trl_available()"),
    ("verl.utils.torch_functional:logprobs_from_logits_v2", "for logit in logits"),
    ("verl.utils.torch_functional:logprobs_from_logits_v2", "for row_logits, row_labels in zip"),
    ("verl.utils.torch_functional:logprobs_from_logits", "logprobs_from_logits_v2"),
    (BUILD, "self.engine_config.offload_policy or self.engine_config.forward_only"),
    (BUILD, "CPUOffloadPolicy(pin_memory=True)"),
    (BUILD, "apply_fsdp2(module, fsdp_kwargs, self.engine_config)"),
    (BUILD, "fsdp2_load_full_state_dict(module, full_state, fsdp_mesh, offload_policy)"),
    ("verl.utils.fsdp_utils:get_init_weight_context_manager", 'torch.device("cpu")'),
    ("verl.workers.config.model:HFModelConfig.__post_init__", "hf_tokenizer("),
    ("verl.workers.config.model:HFModelConfig.__post_init__", "hf_processor("),
    ("verl.experimental.reward_loop.reward_loop:RewardLoopWorker", "trust_remote_code=True"),
    (f"{TRAINER}._compute_values", "ray.get(output.futures)"),
    (f"{TRAINER}._init_resource_pool_mgr", "ray.remote(ActorRolloutRefWorker)"),
    (f"{TRAINER}.fit", "self.logger = Tracking("),
    # retry.py: gradients are zeroed before a pass, so that a pass can be done again; sizes are read from the batch
    ("verl.workers.engine.base:BaseEngine.train_batch", "self.optimizer_zero_grad()"),
    ("verl.workers.engine.utils:prepare_micro_batches", 'micro_batch_size_per_gpu = data["micro_batch_size_per_gpu"]'),
    ("verl.workers.engine.utils:prepare_micro_batches", 'max_token_len_per_gpu = data["max_token_len_per_gpu"]'),
    ("verl.trainer.ppo.v1.replay_buffer:ReplayBuffer", "tq.kv_list()"),
    ("verl.trainer.ppo.v1.replay_buffer:ReplayBuffer.__init__", "poll_interval: float = 2.0"),
    ("verl.trainer.ppo.padding_utils:upsample_batch_to_divisible_size", "tq.kv_batch_get("),
    # what plugin/__init__ and trainers/environment say
    ("verl.utils.distributed:initialize_global_process_group_ray", 'f"cpu:gloo,{get_device_name()}:'),
    ("verl.utils.distributed:initialize_global_process_group_ray", "if not torch.distributed.is_initialized():"),
    ("verl.trainer.ppo.v1.agent_loop_tq:_settle_session_tasks", "return_exceptions=True"),
    ("verl.trainer.ppo.core_algos:kl_penalty_forward", "torch.clamp(kld, min=-10, max=10)"),
]


ENGINE = "verl/workers/engine/fsdp/transformer_impl.py"
V1 = "verl/trainer/ppo/v1"
# "file.py:line" in comments of plugin/, trainers/ and verl_config.py, and what must stand there
CITED = [
    (f"{V1}/agent_loop_tq.py:50", "class AgentLoopWorkerTQ"),
    (f"{V1}/agent_loop_tq.py:138-149", 'status = "failure"'),
    (f"{V1}/agent_loop_tq.py:66-79", "sampling_params = dict("),
    (f"{V1}/trainer_base.py:1732", "ray.get(output.futures)"),
    (f"{V1}/trainer_base.py:1819", "output.get()"),
    (f"{V1}/trainer_base.py:1601", "actor_global_mini_batch_size *= self.config.actor_rollout_ref.rollout.n"),
    ("verl/experimental/reward_loop/reward_manager/naive.py:77", "run_in_executor"),
    ("verl/experimental/reward_loop/reward_manager/base.py:47", "self.loop = get_event_loop()"),
    ("verl/experimental/agent_loop/agent_loop.py:685", "hydra.utils.instantiate("),
    ("verl/single_controller/ray/base.py:233", 'node_info.get("GPU", 0)'),
    ("verl/single_controller/base/worker.py:190", 'os.environ["RANK"]'),
    ("verl/workers/engine_workers.py:218", "max_memory_allocated"),
    ("verl/workers/engine_workers.py:668", "self.rollout = rollout_cls("),
    ("verl/workers/engine_workers.py:767-790", "do_lora_base_sync"),
    ("verl/workers/rollout/llm_server.py:99", "async def generate("),
    ("verl/workers/rollout/base.py:88", "_ROLLOUT_REGISTRY = {"),
    ("verl/utils/distributed.py:89", "cpu:gloo,"),
    ("verl/trainer/ppo/core_algos.py:2240-2245", "torch.clamp(kld, min=-10, max=10)"),
    (f"{ENGINE}:1143", 'model_type="language_model"'),
    (f"{ENGINE}:1594", 'model_type="value_model"'),
    (f"{ENGINE}:1553", "torch.autocast("),
    (f"{ENGINE}:822", "skip the update"),
    (f"{ENGINE}:391-399", "param_dtype = torch.bfloat16"),
    (f"{ENGINE}:444", "sync_module_states=True"),
    (f"{ENGINE}:514", "num_warmup_steps"),
    ("verl/workers/config/model.py:185", '"flash_attention_2"'),
    ("verl/trainer/ppo/reward.py:70", 'config.reward.get("custom_reward_function")'),
]


class TestReasons:
    @pytest.mark.parametrize(("place", "text"), REASONS)
    def test_verl_still_has_what_makes_it_needed(self, place, text):
        assert text in source(place)

    def test_engines_are_registered_for_accelerators_only(self):
        from verl.workers.engine.fsdp import transformer_impl

        text = inspect.getsource(transformer_impl)
        found = re.findall(r'register\(model_type="(\w+)", backend=\["fsdp", "fsdp2"\], device=(\[.*?\])\)', text)
        assert dict(found) == dict.fromkeys(("language_model", "value_model"), '["cuda", "npu"]')

    def test_rollouts_are_ours(self):
        from verl.workers.rollout.base import get_rollout_class

        shims.register_rollout()
        assert [get_rollout_class(name).__module__ for name in ("hf", "vllm")] == [
            "quickstart.plugin.rollout",
            "quickstart.plugin.vllm_rollout",
        ]

    def test_no_rollout_of_verls_is_called_hf(self):
        from verl.workers.rollout import base

        assigned = [n for n in verl_text.tree(base).body if isinstance(n, ast.Assign)]
        table = next(n.value for n in assigned if ast.unparse(n.targets[0]) == "_ROLLOUT_REGISTRY")
        assert {name for name, _ in ast.literal_eval(table)} == {"vllm", "sglang", "trtllm"}

    def test_a_plain_module_is_version_0_to_verls_engine(self):
        from verl.utils.fsdp_utils import fsdp_version

        assert fsdp_version(torch.nn.Linear(2, 2)) == 0

    @pytest.mark.parametrize(("place", "text"), CITED)
    def test_lines_cited_in_comments(self, place, text):
        assert any(text in near for near in verl_text.lines_near(place))


class TestReplacements:
    @pytest.mark.parametrize("shape", [(3, 5, 17), (7, 17)])
    def test_cross_entropy_is_verls_loop_in_float32(self, shape):
        from verl.utils.torch_functional import logprobs_from_logits_v2

        random = torch.Generator().manual_seed(0)
        logits = 8 * torch.randn(shape, generator=random)
        labels = torch.randint(17, shape[:-1], generator=random)
        ours = shims.logprobs_by_cross_entropy(logits, labels)
        assert ours.shape == labels.shape
        torch.testing.assert_close(ours, logprobs_from_logits_v2(logits, labels), rtol=1e-6, atol=2e-6)

    def test_cross_entropy_of_half_precision_is_exact_where_verls_rounds(self):
        from verl.utils.torch_functional import logprobs_from_logits_v2

        random = torch.Generator().manual_seed(0)
        logits = (8 * torch.randn(4, 6, 50, generator=random)).bfloat16()
        labels = torch.randint(50, (4, 6), generator=random)
        exact = logits.double().log_softmax(-1).gather(-1, labels[..., None])[..., 0]
        ours = shims.logprobs_by_cross_entropy(logits, labels)
        assert ours.dtype == torch.float32
        assert (ours - exact).abs().max() < 1e-5
        assert (logprobs_from_logits_v2(logits, labels) - exact).abs().max() > 1e-3

    def test_cross_entropy_has_the_gradient_of_a_log_softmax(self):
        logits = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)
        labels = torch.tensor([0, 8, 3, 3])
        assert torch.autograd.gradcheck(lambda x: shims.logprobs_by_cross_entropy(x, labels), logits)

    def test_value_head_takes_the_configs_attention(self, tiny_tied):
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(tiny_tied, attn_implementation="eager", num_labels=1)
        model = shims.load_value_head_model(str(tiny_tied), torch.float32, config, False)
        assert model.config._attn_implementation == "eager"
        ids = torch.tensor([[5, 6, 7]])
        assert model(input_ids=ids).logits.shape == (1, 3, 1)

    def test_value_head_is_drawn_from_the_runs_seed(self, tiny_tied):
        from transformers import AutoConfig

        def head(seed):
            torch.manual_seed(seed)
            config = AutoConfig.from_pretrained(tiny_tied, attn_implementation="sdpa", num_labels=1)
            return shims.load_value_head_model(str(tiny_tied), torch.float32, config, False).score.weight

        torch.testing.assert_close(head(1), head(1), rtol=0, atol=0)
        assert not torch.equal(head(1), head(2))

    def test_weights_are_read_to_the_device(self):
        with shims.load_on_device(use_meta_tensor=True)():
            assert torch.empty(1).device == torch.device("cpu")

    def test_tokenizer_is_loaded_once(self, tiny_tied):
        first = shims.tokenizer_once(str(tiny_tied), trust_remote_code=False)
        assert shims.tokenizer_once(str(tiny_tied), trust_remote_code=False) is first

    def test_reward_workers_tokenizer_runs_no_code_unless_the_user_says_so(self, tiny_tied, monkeypatch):
        asked = []
        monkeypatch.setattr(shims, "tokenizer_once", lambda name, **kwargs: asked.append(kwargs))
        shims.tokenizer_with_trust(False)(str(tiny_tied), trust_remote_code=True)
        shims.tokenizer_with_trust(True)(str(tiny_tied), trust_remote_code=True)
        assert asked == [{"trust_remote_code": False}, {"trust_remote_code": True}]


class TestInstall:
    def names(self):
        return [getattr(shim.module, shim.name) for shim in SHIMS]

    def test_undo_restores_every_name(self):
        before = self.names()
        undo = shims.install("cpu")
        assert sum(a is not b for a, b in zip(before, self.names(), strict=True)) == len(shims.shims_for("cpu"))
        undo()
        assert all(a is b for a, b in zip(before, self.names(), strict=True))

    def test_the_allocator_is_set_through_verl_before_any_model(self, monkeypatch):
        from verl.plugin.platform import get_platform

        asked = []
        monkeypatch.setattr(type(get_platform()), "set_allocator_settings", lambda self, text: asked.append(text))
        shims.install("cpu")()
        assert asked == ["expandable_segments:True"]

    @pytest.mark.parametrize("before", [True, False])
    def test_cudnn_makes_no_plans_during_a_run(self, before):
        """A user's own choice is there again after it."""
        was = torch.backends.cuda.cudnn_sdp_enabled()
        try:
            torch.backends.cuda.enable_cudnn_sdp(before)
            undo = shims.install("cpu")
            assert not torch.backends.cuda.cudnn_sdp_enabled()
            undo()
            assert torch.backends.cuda.cudnn_sdp_enabled() == before
        finally:
            torch.backends.cuda.enable_cudnn_sdp(was)

    def test_a_missing_name_is_an_error_and_nothing_is_replaced(self):
        from verl.utils import model

        before = model.load_valuehead_model
        good = shims.Shim(module=model, name="load_valuehead_model", replacement=None, why="x", where="y")
        bad = shims.Shim(module=model, name="no_such_function", replacement=None, why="x", where="y")
        with pytest.raises(AttributeError, match="no_such_function"):
            shims.replace_names([good, bad])
        assert model.load_valuehead_model is before

    @pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()])
    def test_in_process_restores_every_name_after_an_error(self, error):
        before = self.names()
        inside, runs = [], []

        def fails():
            with local.in_process() as run:
                runs.append(run)
                inside.extend(self.names())
                raise error

        with pytest.raises(type(error)):
            fails()
        assert sum(a is not b for a, b in zip(before, inside, strict=True)) == len(runs[0].stand_ins())
        assert all(a is b for a, b in zip(before, self.names(), strict=True))
        assert runs[0].loop.loop.is_closed()

    def test_another_verl_is_refused_with_one_message(self, monkeypatch):
        monkeypatch.setattr(metadata, "version", lambda package: "0.9.2")
        with pytest.raises(UserError) as caught:
            shims.install("cpu")
        assert len(caught.value.faults) == 1
        assert "0.9.2" in str(caught.value)
        assert f"pip install verl=={SUPPORTED_VERL}" in str(caught.value)

    def test_the_supported_verl_is_the_pinned_one(self):
        text = (verl_text.Path(__file__).parents[1] / "pyproject.toml").read_text()
        assert f'"verl=={SUPPORTED_VERL}"' in text

    def test_a_gpu_gets_no_cpu_engine_and_may_keep_the_reference_in_host_memory(self):
        names = {s.name for s in shims.shims_for("cuda", reference_on_device=False, one_device=False)}
        assert not names & {"CPUOffloadPolicy", "apply_fsdp2", "fsdp2_load_full_state_dict"}
        assert {"CPUOffloadPolicy", "apply_fsdp2"} <= {s.name for s in shims.shims_for("cuda")}

    def test_engines_and_rollout_are_registered(self):
        from verl.workers.engine.base import EngineRegistry
        from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead
        from verl.workers.rollout.base import get_rollout_class

        from quickstart.plugin.rollout import LocalRollout

        shims.install("cpu")()
        engines = EngineRegistry._engines
        assert engines["language_model"]["fsdp2"]["cpu"] is FSDPEngineWithLMHead
        assert engines["value_model"]["fsdp2"]["cpu"] is FSDPEngineWithValueHead
        assert get_rollout_class("hf") is LocalRollout
