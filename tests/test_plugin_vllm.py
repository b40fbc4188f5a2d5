"""The vllm engine without vllm: what it asks of it, in which order, and what the user is told where it is missing.

A stand-in (support/fake_vllm) has the calls that the engine makes. What only vllm and a GPU can show is in
test_plugin_vllm_engine.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from quickstart.errors import RunError
from quickstart.plugin import vllm_engine
from quickstart.plugin.engine import Sampling
from quickstart.plugin.vllm_engine import VllmGenerator, answer_of, cache_bytes, load, parts_of, take_weights, whole_of

ROOT = Path(__file__).resolve().parents[1]
FAKE = ROOT / "tests" / "support" / "fake_vllm"
GREEDY = Sampling(temperature=0.0, max_new_tokens=8)
WARM = Sampling(max_new_tokens=8)


@pytest.fixture
def vllm(monkeypatch):
    """The stand-in, as the package vllm."""
    for name in vllm_engine.VARIABLES:
        monkeypatch.setenv(name, "")
    monkeypatch.syspath_prepend(str(FAKE))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    import vllm

    yield vllm
    sys.modules.pop("vllm", None)


def make(folder, **changes):
    settings = {"dtype": "bfloat16", "positions": 64, "stop_token_ids": [1, 7, 1], "seed": 3, "max_rows": 16}
    return VllmGenerator(str(folder), **settings | {"cache": 1 << 20, "share": 0.01} | changes)


def weights(folder):
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


class TestSettings:
    def test_the_engine(self, vllm, tiny_tied):
        make(tiny_tied, eager=True)
        (llm,) = vllm.LLM.made
        assert llm.settings["model"] == str(tiny_tied)
        wanted = {
            "load_format": "dummy", "dtype": "bfloat16", "max_model_len": 64, "max_num_seqs": 16, "seed": 3,
            "kv_cache_memory_bytes": 1 << 20, "enable_sleep_mode": True, "enable_prefix_caching": False,
            "enforce_eager": True, "logprobs_mode": "processed_logprobs", "skip_tokenizer_init": True,
            "trust_remote_code": False,
        }  # fmt: skip
        assert {name: llm.settings[name] for name in wanted} == wanted
        assert llm.variables["VLLM_ENABLE_V1_MULTIPROCESSING"] == llm.variables["VLLM_USE_FLASHINFER_SAMPLER"] == "0"

    def test_a_request(self, vllm, tiny_tied):
        engine = make(tiny_tied)
        engine.generate([[5, 6]], [Sampling(temperature=0.7, top_p=0.9, top_k=20, max_new_tokens=4)])
        (request,) = vllm.LLM.made[0].requests
        assert (request.temperature, request.top_p, request.top_k, request.max_tokens) == (0.7, 0.9, 20, 4)
        assert (request.stop_token_ids, request.logprobs, request.detokenize) == ([1, 7], 0, False)

    def test_the_cache_holds_every_sequence(self):
        from transformers import Qwen2Config

        config = Qwen2Config(hidden_size=896, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2)
        exact = 2 * 24 * 2 * 64 * 2 * 200 * 192  # keys and values, layers, heads, size, bytes, rows, 3 pages of 64
        assert cache_bytes(config, 200, 130, 2) == int(1.1 * exact)


class TestAnswers:
    def test_come_in_the_order_of_the_prompts(self, vllm, tiny_tied):
        engine, prompts = make(tiny_tied), [[5, i] for i in range(6)]
        told = []
        together = engine.generate(prompts, [GREEDY] * 6, told.append)
        assert together == [engine.generate([prompt], [GREEDY])[0] for prompt in prompts]
        assert told == [sum(len(answer.token_ids) for answer in together)]

    def test_have_the_log_prob_of_each_drawn_token(self, vllm, tiny_tied):
        (answer,) = make(tiny_tied).generate([[5, 6]], [WARM])
        assert answer.log_probs == [-token / 100 for token in answer.token_ids]

    def test_end_with_their_stop_token(self, vllm, tiny_tied):
        (answer,) = make(tiny_tied, stop_token_ids=list(range(2, 250))).generate([[5, 6]], [WARM])
        assert (len(answer.token_ids), answer.finish_reason) == (1, "stop")
        (longer,) = make(tiny_tied, stop_token_ids=[0]).generate([[5, 6]], [WARM])
        assert (len(longer.token_ids), longer.finish_reason) == (8, "length")

    def test_another_end_is_a_bug(self):
        with pytest.raises(AssertionError, match="abort"):
            answer_of(types.SimpleNamespace(token_ids=[], logprobs=[], finish_reason="abort"))

    def test_no_empty_prompt(self, vllm, tiny_tied):
        with pytest.raises(AssertionError, match="empty prompt"):
            make(tiny_tied).generate([[]], [WARM])


class TestDraws:
    def drawn(self, engine, *numbers):
        engine.begin(*numbers)
        return [answer.token_ids for answer in engine.generate([[5, 6]] * 4, [WARM] * 4)]

    def test_equal_prompts_get_different_answers(self, vllm, tiny_tied):
        assert len({tuple(tokens) for tokens in self.drawn(make(tiny_tied), 1, 0)}) == 4

    def test_follow_from_the_step_and_the_seed_alone(self, vllm, tiny_tied):
        engine = make(tiny_tied)
        first, more, again = self.drawn(engine, 1, 0), self.drawn(engine, 2, 0), self.drawn(engine, 1, 0)
        assert first == again != more
        assert self.drawn(make(tiny_tied), 1, 0) == first != self.drawn(make(tiny_tied, seed=4), 1, 0)

    def test_leave_the_generators_of_the_process_as_they_were(self, vllm, tiny_tied):
        def numbers():
            return random.random(), np.random.random(), torch.rand(()).item()

        def seeded(work):
            random.seed(0)
            np.random.seed(0)
            torch.manual_seed(0)
            return work()

        engine = make(tiny_tied)
        expected = seeded(numbers)
        seeded(lambda: self.drawn(engine, 1, 0))
        assert numbers() == expected

    def test_go_on_within_a_step(self, vllm, tiny_tied):
        engine = make(tiny_tied)
        first = self.drawn(engine, 1, 0)
        assert [answer.token_ids for answer in engine.generate([[5, 6]] * 4, [WARM] * 4)] != first


class TestWeights:
    @pytest.mark.parametrize("folder", ["tiny_tied", "tiny_untied"])
    def test_all_are_taken(self, vllm, folder, request):
        folder = request.getfixturevalue(folder)
        engine = make(folder)
        engine.load_weights(weights(folder).items())
        assert vllm.LLM.made[0].model.got.keys() == weights(folder).keys()

    @pytest.mark.parametrize(
        "name", ["model.norm.weight", "model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight"]
    )
    def test_a_missing_one_is_an_error(self, vllm, tiny_tied, name):
        sent = {key: value for key, value in weights(tiny_tied).items() if key != name}
        with pytest.raises(AssertionError, match=f"missing .*{name}"):
            make(tiny_tied).load_weights(sent.items())

    @pytest.mark.parametrize(
        ("name", "error"), [("model.layers.0.lora_A.weight", AssertionError), ("base_model.norm.weight", ValueError)]
    )
    def test_an_unknown_one_is_an_error(self, vllm, tiny_tied, name, error):
        more = {name: torch.zeros(1)}
        with pytest.raises(error, match=name):
            make(tiny_tied).load_weights((weights(tiny_tied) | more).items())

    def test_a_tied_head_may_come(self, vllm, tiny_tied):
        head = {"lm_head.weight": torch.zeros(1)}
        make(tiny_tied).load_weights((weights(tiny_tied) | head).items())

    def test_names_that_vllm_renames_are_left_to_it(self):
        model = types.SimpleNamespace(
            packed_modules_mapping={"qkv_proj": ["q_proj", "k_proj", "v_proj"]},
            named_parameters=lambda: [("a.qkv_proj.weight", None)],
            load_weights=lambda pairs: {"a.qkv_proj.weight" for _ in pairs},
        )
        take_weights(model, [("language_model.a.q_proj.weight", torch.zeros(1))])

    def test_parts_of_a_joined_weight(self):
        joined = {"qkv_proj": ["q_proj", "k_proj"], "gate_up_proj": ["gate_up_proj"]}
        assert whole_of("a.k_proj.bias", joined) == "a.qkv_proj.bias"
        assert whole_of("a.gate_up_proj.weight", joined) == "a.gate_up_proj.weight"
        assert parts_of("a.qkv_proj.bias", joined) == {"a.q_proj.bias", "a.k_proj.bias"}
        assert parts_of("a.o_proj.bias", joined) == set()


class TestSleep:
    def test_weights_are_taken_between_the_two_halves_of_waking(self, vllm, tiny_tied):
        engine = make(tiny_tied)
        engine.release()
        engine.release()
        with pytest.raises(AssertionError, match="resume"):
            engine.generate([[5]], [WARM])
        engine.resume("weights")
        engine.load_weights(weights(tiny_tied).items())
        engine.resume("kv_cache")
        engine.resume("weights")
        assert vllm.LLM.made[0].calls == [("sleep", 2), ("wake", "weights"), ("apply",), ("wake", "kv_cache")]
        assert len(engine.generate([[5]], [WARM])) == 1


class TestRollout:
    """Behind verl's interface."""

    @pytest.fixture
    def make(self, vllm, monkeypatch, tiny_tied):
        from verl.utils.config import omega_conf_to_dataclass
        from verl.workers.config import HFModelConfig, RolloutConfig

        from quickstart.plugin.vllm_rollout import VllmRollout

        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (4 << 20, 1 << 30))

        def rollout(**changes):
            model = HFModelConfig(path=str(tiny_tied), override_config={"attn_implementation": "sdpa"})
            settings = {"name": "vllm", "dtype": "float32", "prompt_length": 12, "response_length": 8, "seed": 0}
            config = omega_conf_to_dataclass(RolloutConfig(**settings | {"max_num_seqs": 4} | changes))
            return VllmRollout(config, model, types.SimpleNamespace(device_type="cuda"))

        return rollout

    def update(self, rollout, folder, steps=0):
        async def as_verl_does():
            await rollout.resume(tags=["weights"])
            await rollout.update_weights(iter(weights(folder).items()), global_steps=steps)
            await rollout.resume(tags=["kv_cache"])

        asyncio.run(as_verl_does())

    def ask(self, rollout, *prompts):
        async def together():
            calls = [rollout.generate(str(i), prompt_ids=p, sampling_params={}) for i, p in enumerate(prompts)]
            return await asyncio.gather(*calls, return_exceptions=True)

        return asyncio.run(together())

    def test_sleeps_while_the_trainer_works(self, vllm, make, tiny_tied):
        rollout = make(free_cache_engine=True)
        asyncio.run(rollout.release())  # after its start, before a checkpoint is read
        for step in range(2):
            self.update(rollout, tiny_tied, step)
            rollout.begin(step, 0)
            (answer,) = self.ask(rollout, [5, 6])
            assert answer.extra_fields["global_steps"] == step
            asyncio.run(rollout.release())
        around = [("sleep", 2), ("wake", "weights"), ("apply",), ("wake", "kv_cache")]
        assert vllm.LLM.made[0].calls == [*around, *around, ("sleep", 2)]

    def test_stays_awake_where_it_is_told_to(self, vllm, make, tiny_tied):
        rollout = make(free_cache_engine=False)
        asyncio.run(rollout.release())
        self.update(rollout, tiny_tied)
        assert vllm.LLM.made[0].calls == [("apply",)]

    def test_builds_no_other_model(self, make):
        assert not hasattr(make(), "model")

    @pytest.mark.parametrize(("changes", "positions"), [({}, 20), ({"response_length": 4096}, 512)])
    def test_is_as_long_as_the_run_needs(self, vllm, make, changes, positions):
        make(**changes)
        assert vllm.LLM.made[0].settings["max_model_len"] == positions

    def test_takes_at_most_its_share_of_what_is_free(self, vllm, make):
        make(gpu_memory_utilization=0.5, max_num_seqs=256)
        settings = vllm.LLM.made[0].settings
        assert settings["kv_cache_memory_bytes"] == 2 << 20
        assert settings["gpu_memory_utilization"] == 0.01

    def test_answers_need_weights(self, make):
        (error,) = self.ask(make(), [5, 6])
        assert "no weights yet" in str(error)

    def test_out_of_memory_ends_clearly(self, make, tiny_tied, monkeypatch):
        rollout = make()
        self.update(rollout, tiny_tied)

        def fail(*_, **__):
            raise RuntimeError("CUDA Error: out of memory at csrc/cumem_allocator.cpp:139")

        monkeypatch.setattr(rollout._engine._llm, "generate", fail)
        errors = self.ask(rollout, [5, 6], [7])
        assert all(isinstance(error, RunError) for error in errors)
        assert "rl.rollout_engine=hf" in str(errors[0])


class TestMessages:
    def test_a_broken_import(self, monkeypatch, tmp_path):
        (tmp_path / "vllm.py").write_text("raise OSError('libcudart.so.13:\\n cannot open shared object file')")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "vllm", raising=False)
        with pytest.raises(RunError) as caught:
            load()
        (fault,) = caught.value.faults
        assert fault.field == "rl.rollout_engine"
        assert fault.rule == "vllm does not import here: OSError: libcudart.so.13: cannot open shared object file"
        assert "rl.rollout_engine=hf" in fault.fix

    def test_an_engine_that_does_not_start(self, vllm, tiny_tied, monkeypatch):
        monkeypatch.setenv("FAKE_VLLM_REFUSES", "1")
        with pytest.raises(RunError, match=r"vllm does not start here: ValueError: .* no such architecture"):
            make(tiny_tied)

    def test_too_little_memory_is_told_by_those_who_know_the_figures(self, vllm, tiny_tied, monkeypatch):
        def fail(**_):
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(vllm, "LLM", fail)
        with pytest.raises(torch.OutOfMemoryError):
            make(tiny_tied)


# The command line as on a machine with a GPU, as far as that goes without one: the rule that vllm wants CUDA is off.
AS_IF_CUDA = """
import sys
import torch
torch.cuda.mem_get_info = lambda: (4 << 30, 8 << 30)
from quickstart.config import rules
rules.RULES = tuple(rule for rule in rules.RULES if rule.field != "rl.rollout_engine")
from quickstart import run
sys.exit(run.main(sys.argv[1:]))
"""


class TestCommandLine:
    @pytest.fixture
    def run(self, tiny_job, tmp_path):
        def start(packages, **variables):
            path = os.pathsep.join(map(str, [ROOT, *packages]))
            return subprocess.run(
                [sys.executable, "-c", AS_IF_CUDA, *tiny_job, "rl.rollout_engine=vllm", "training.max_steps=2"],
                cwd=tmp_path, env=os.environ | {"PYTHONPATH": path} | variables, capture_output=True, text=True,
                check=False,
            )  # fmt: skip

        return start

    def said(self, done, *words):
        assert done.returncode == 2, done.stdout + done.stderr
        assert "Traceback" not in done.stdout + done.stderr
        assert [word for word in words if word not in done.stderr] == []

    def test_missing(self, run):
        self.said(run([]), "nothing was started", "rl.rollout_engine: found vllm", "not installed", "write hf or auto")

    def test_broken(self, run, tmp_path):
        fake = tmp_path / "packages"
        (fake / "vllm-0.24.0.dist-info").mkdir(parents=True)
        (fake / "vllm-0.24.0.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.24.0\n")
        (fake / "vllm.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
        done = run([fake])
        self.said(done, "the run was stopped", "vllm does not import", "undefined symbol", "rl.rollout_engine=hf")
        assert "vllm does not import" in json.loads((tmp_path / "outputs" / "run.json").read_text())["exit_reason"]

    def test_trains(self, run, tmp_path):
        done = run([FAKE])
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Loading vllm and verl" in done.stdout
        assert len(list((tmp_path / "outputs" / "rollouts").iterdir())) == 2
