"""Out of memory in the middle of a run: one retry in halves with the same result, then one clear end."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verl")

import local_runs
import torch
from local_runs import same
from scarce import Memory
from verl.utils import tensordict_utils as tu

from quickstart.errors import RunError
from quickstart.plugin import retry
from quickstart.trainers import ppo

pytestmark = pytest.mark.usefixtures("process_variables")


def engine_of(trainer: Any, role: str) -> Any:
    worker = trainer._run.actor.worker
    return {"actor": lambda: worker.actor, "reference": lambda: worker.ref, "critic": lambda: trainer.critic_wg.worker}[
        role
    ]().engine


# 0 but for the rounding of whole answers' log-probs, squared: -5e-7 in one run, 2e-6 in the other
ROUNDING = "rollout_corr/chi2_seq"
PPO = {"rl": {"rl_type": "ppo", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}}


@pytest.fixture(scope="module")
def train(tiny_tied, sums, tmp_path_factory, process_variables):
    def train(before=None, record=None, **sections):
        cfg = local_runs.settings(tiny_tied, **sections)
        config = local_runs.verl_config_of(cfg, sums, tmp_path_factory.mktemp("run"), steps=2)
        return local_runs.run(config, before=before, record=record)

    return train


@pytest.fixture(scope="module")
def undisturbed(train):
    return train(**PPO)


class TestPPO:
    @pytest.mark.parametrize(
        ("role", "forward_only", "what"),
        [
            ("actor", False, "update of the actor"),
            ("critic", False, "update of the critic"),
            ("critic", True, "values of the critic"),
            ("reference", True, "log-probs of the reference"),
        ],
    )
    def test_the_run_is_that_of_one_with_more_memory(self, train, undisturbed, role, forward_only, what):
        """In the second micro batch: gradients of the first are there, and must go."""
        memory = []

        def break_it(trainer):
            memory.append(Memory(engine_of(trainer, role), 2, forward_only=forward_only))

        record = train(before=break_it, **PPO)
        assert list(record.updates) == [1, 2]
        for step, metrics in record.updates.items():
            assert set(same(metrics, undisturbed.updates[step])) <= {ROUNDING}
        for name, value in undisturbed.weights.items():
            torch.testing.assert_close(record.weights[name], value, rtol=0, atol=1e-6)
        assert memory[0].rows[:6] == [4, 4, 2, 2, 2, 2]
        assert set(memory[0].rows[6:]) == {2}
        (told,) = [line for line in record.phases if "out of memory" in line]
        assert f"in the {what}" in told
        assert "(rl.per_device_train_batch_size 4 -> 2)" in told

    def test_the_second_time_is_a_clear_end(self, train):
        record = local_runs.Recording()
        with pytest.raises(RunError) as caught:
            train(before=lambda trainer: Memory(engine_of(trainer, "actor"), 1, 2), record=record, **PPO)
        text = str(caught.value)
        assert text.startswith("error: the run was stopped\n  - update of the actor: found out of memory")
        assert "half the batch does not fit either" in text
        assert "lower rl.per_device_train_batch_size" in text
        assert list(record.rollouts) == [1]

    def test_so_it_is_later_in_another_role(self, train):
        def break_it(trainer):
            Memory(engine_of(trainer, "actor"), 1)
            Memory(engine_of(trainer, "critic"), 6)

        with pytest.raises(RunError, match=r"update of the critic: .*the batch was halved before"):
            train(before=break_it, **PPO)

    def test_a_batch_of_one_cannot_be_halved(self, train):
        one = {"rl": {"rl_type": "grpo", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}}
        with pytest.raises(RunError, match="a batch of one cannot be halved"):
            train(before=lambda trainer: Memory(engine_of(trainer, "actor"), 1), **one)

    def test_elsewhere_it_is_a_clear_end_too(self, train):
        def break_it(trainer):
            def step():
                raise torch.OutOfMemoryError("CUDA out of memory")

            engine_of(trainer, "actor").optimizer_step = step

        with pytest.raises(RunError, match="step 1: found out of memory"):
            train(before=break_it, **PPO)


class TestLossScale:
    def test_each_norm_has_its_loss_and_its_scaler(self, train):
        """float16 itself needs a GPU; in float32 verl's engines have the attribute, and no scaler in it."""
        seen = {}

        def look(trainer):
            seen["scalers"] = {name: trainer._scaler(name) for name in ppo.NORMS}
            seen["engines"] = [engine_of(trainer, role) for role in ("actor", "critic")]

        record = train(before=look, **PPO)
        assert set(ppo.NORMS) | set(ppo.NORMS.values()) <= set(record.updates[1])
        assert list(seen["scalers"].values()) == [None, None]  # float32
        assert all(hasattr(engine, "scaler") for engine in seen["engines"])


def batch(lengths: list[int], **facts: Any) -> Any:
    ids = torch.nested.as_nested_tensor([torch.zeros(n, dtype=torch.int64) for n in lengths], layout=torch.jagged)
    return tu.get_tensordict(tensor_dict={"input_ids": ids}, non_tensor_dict=facts)


class TestHalve:
    @pytest.mark.parametrize(
        ("rows", "micro", "group", "change"),
        [
            (20, 20, 1, (20, 10, "rows")),
            (15, 5, 1, (5, 1, "rows")),  # 2 does not divide 15
            (12, 4, 1, (4, 2, "rows")),
            (8, 4, 2, (4, 2, "pairs")),
            (8, 1, 1, None),
            (2, 1, 2, None),
        ],
    )
    def test_sizes(self, rows, micro, group, change):
        data = batch([3] * rows, use_dynamic_bsz=False, micro_batch_size_per_gpu=micro, force_group_size=group)
        assert retry.halve(data) == change
        assert data["micro_batch_size_per_gpu"] == (change[1] if change else micro)

    @pytest.mark.parametrize(
        ("lengths", "limit", "group", "change"),
        [
            ([30, 50, 20], 100, 1, (100, 50, "tokens")),
            ([30, 70, 20], 100, 1, (100, 70, "tokens")),
            ([30, 30, 40, 10], 100, 2, (100, 60, "tokens")),
            ([100, 3], 100, 1, None),
        ],
    )
    def test_tokens(self, lengths, limit, group, change):
        data = batch(lengths, use_dynamic_bsz=True, max_token_len_per_gpu=limit, force_group_size=group)
        assert retry.halve(data) == change
        assert data["max_token_len_per_gpu"] == (change[1] if change else limit)


class TestWords:
    @pytest.mark.parametrize(
        ("error", "is_one"),
        [
            (torch.OutOfMemoryError("x"), True),
            (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), True),
            (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
            (RuntimeError("shape mismatch"), False),
            (ValueError("CUDA error: out of memory"), False),
        ],
    )
    def test_what_counts(self, error, is_one):
        assert retry.is_out_of_memory(error) == is_one

    def test_figures_of_a_gpu_that_is_shared(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2 * 10**9, 24 * 10**9))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 8 * 10**9)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 7 * 10**9)
        words = retry.memory_words()
        assert words == (
            " (7.0 GB in use by this run, 2.0 of 24.0 GB free on the GPU, 14.0 GB held by other processes)"
        )
        error = retry.out_of_memory("update of the actor", words, "half the batch does not fit either")
        assert "fix: end other programs on the GPU (nvidia-smi lists them); lower rl." in str(error)

    def test_other_errors_are_not_touched(self):
        with pytest.raises(ValueError, match="bug"), retry.clear_end(lambda: "a step"):
            raise ValueError("bug")
