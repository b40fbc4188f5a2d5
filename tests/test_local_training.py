"""Whole runs on the local backend with a tiny model: repeatable, resumable, in the precision that was asked for."""

import math
from pathlib import Path

import local_runs
import pytest
import torch
from local_runs import same

from quickstart.trainers import ppo
from quickstart.trainers.watch import StopRequested

STEPS = 4


@pytest.fixture(scope="module")
def train(tiny_tied, sums, tmp_path_factory, process_variables):
    """Runs with the given sections on top of the small ones; every run in a folder of its own."""

    def train(steps=STEPS, policy=tiny_tied, before=None, **sections):
        work = tmp_path_factory.mktemp("run")
        cfg = local_runs.settings(policy, **sections | {"data": {"eval_file": str(sums)}})
        config = local_runs.verl_config_of(cfg, sums, work, steps=steps, evaluation=sums)
        return local_runs.run(config, before=before)

    return train


# PPO with everything: critic, reference, recomputed log-probs, two updates a step, a checkpoint in the middle
FULL = {
    "rl": {"rl_type": "ppo", "per_device_train_batch_size": 4, "recompute_old_log_probs": True},
    "training": {"save_steps": 2, "save_total_limit": 10, "eval_steps": 2},
}


@pytest.fixture(scope="module")
def whole(train):
    return train(**FULL)


class TestRepeatable:
    def test_one_seed_gives_the_same_run(self, train, whole):
        again = train(**FULL)
        assert list(again.updates) == list(whole.updates) == [1, 2, 3, 4]
        for step in whole.updates:
            assert same(again.updates[step], whole.updates[step]) == []
            assert [r["response"] for r in again.rollouts[step]] == [r["response"] for r in whole.rollouts[step]]
        for name, value in whole.weights.items():
            torch.testing.assert_close(again.weights[name], value, rtol=0, atol=1e-6)

    def test_evaluations_and_checkpoints_change_nothing(self, train, whole):
        bare = train(steps=3, rl=FULL["rl"])
        assert [r["response"] for r in bare.rollouts[3]] == [r["response"] for r in whole.rollouts[3]]
        assert bare.updates[3]["actor/grad_norm"] == pytest.approx(whole.updates[3]["actor/grad_norm"], rel=1e-6)

    def test_another_seed_gives_another(self, train, whole):
        other = train(steps=1, rl=FULL["rl"], training={"seed": 2})
        assert [r["response"] for r in other.rollouts[1]] != [r["response"] for r in whole.rollouts[1]]

    def test_weights_move(self, whole, tiny_tied):
        from safetensors.torch import load_file

        start = load_file(tiny_tied / "model.safetensors")
        moved = [name for name, value in start.items() if not torch.equal(whole.weights[name], value)]
        assert len(moved) == len(start)


class TestResume:
    @pytest.fixture(scope="class")
    def resumed(self, train, whole):
        training = FULL["training"] | {"resume_from_checkpoint": str(whole.checkpoints[2])}
        return train(**FULL | {"training": training})

    def test_goes_on_with_the_next_step(self, resumed):
        assert list(resumed.updates) == [3, 4]

    def test_answers_are_those_of_the_undisturbed_run(self, resumed, whole):
        for step in resumed.updates:
            mine, theirs = resumed.rollouts[step], whole.rollouts[step]
            assert [(r["prompt"], r["response"]) for r in mine] == [(r["prompt"], r["response"]) for r in theirs]

    def test_so_are_the_metrics(self, resumed, whole):
        for step in resumed.updates:
            assert same(resumed.updates[step], whole.updates[step]) == []

    def test_so_are_the_weights(self, resumed, whole):
        for name, value in whole.weights.items():
            torch.testing.assert_close(resumed.weights[name], value, rtol=0, atol=1e-6)


class TestRolloutFollowsTheActor:
    def test_its_log_probs_are_the_actors_in_every_step(self, whole):
        for metrics in whole.updates.values():
            assert metrics["training/rollout_probs_diff_max"] < 1e-5
            assert metrics["rollout_corr/kl"] == pytest.approx(0, abs=1e-5)

    @pytest.mark.parametrize("policy", ["tiny_untied", "tiny_llama"])
    def test_of_other_models_too(self, train, policy, request):
        record = train(steps=2, policy=request.getfixturevalue(policy), rl=FULL["rl"] | {"rl_type": "grpo"})
        assert all(m["training/rollout_probs_diff_max"] < 1e-5 for m in record.updates.values())

    def test_with_a_temperature(self, train):
        record = train(steps=2, rl=FULL["rl"] | {"temperature": 0.7})
        assert all(m["training/rollout_probs_diff_max"] < 1e-5 for m in record.updates.values())

    def test_adapters_are_merged(self, train):
        """verl rounds merged weights to bf16 on their way (transformer_impl.py:1082): the gap stays that small."""
        lora = {
            "model": {"lora_rank": 8, "lora_alpha": 64},
            "rl": FULL["rl"] | {"rl_type": "grpo", "learning_rate": 1e-2},
        }
        record = train(steps=3, **lora)
        gaps = [m["training/rollout_probs_diff_max"] for m in record.updates.values()]
        moved = [m["actor/ref_log_ratio_max"] for m in record.updates.values()]
        assert moved[0] == pytest.approx(0, abs=1e-5)
        assert moved[2] > 0.3
        assert max(gaps) < 0.03


def dtypes_of(trainer, seen):
    """Watch one projection of the actor: type of its output, and of the gradient that its weight gets."""
    projection = trainer._run.actor.worker.actor.engine.module.model.layers[0].self_attn.q_proj
    projection.register_forward_hook(lambda _, args, out: seen["activation"].add(out.dtype))
    projection.weight.register_hook(lambda grad: seen["gradient"].add(grad.dtype))
    seen["weight"].add(projection.weight.dtype)


class TestPrecision:
    @pytest.fixture
    def seen(self):
        return {"activation": set(), "gradient": set(), "weight": set()}

    def test_float32_computes_in_float32(self, train, seen):
        train(steps=1, before=lambda trainer: dtypes_of(trainer, seen))
        assert seen == {"activation": {torch.float32}, "gradient": {torch.float32}, "weight": {torch.float32}}

    def test_control_without_mixed_precision_verl_computes_in_bf16(self, train, seen):
        verl = {"actor_rollout_ref.actor.fsdp_config.mixed_precision": None}
        train(steps=1, before=lambda trainer: dtypes_of(trainer, seen), verl=verl)
        assert seen["activation"] == {torch.bfloat16}

    def test_bfloat16_keeps_weights_and_gradients_in_float32(self, train, seen):
        train(steps=1, before=lambda trainer: dtypes_of(trainer, seen), model={"torch_dtype": "bfloat16"})
        assert seen["activation"] == {torch.bfloat16}
        assert seen["gradient"] == seen["weight"] == {torch.float32}


class TestMicroBatches:
    @pytest.mark.parametrize("role", ["actor", "critic"])
    def test_no_forward_with_gradients_takes_more_rows(self, train, role):
        """verl's V1 trainer drops the critic's setting on its way to the engine: a whole step went through at once."""
        rows = []

        def watch(trainer):
            worker = trainer._run.actor.worker.actor if role == "actor" else trainer.critic_wg.worker
            embedding = worker.engine.module.get_input_embeddings()
            embedding.register_forward_hook(note)

        def note(module, args, out):
            if out.requires_grad:
                rows.append(len(args[0]))

        train(steps=1, before=watch, rl={"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2})
        assert set(rows) == {2}


class TestStopping:
    def test_between_two_steps_with_the_last_one_done(self, train, tiny_tied, sums, tmp_path):
        config = local_runs.verl_config_of(local_runs.settings(tiny_tied), sums, tmp_path, steps=5)
        asked = []

        def stop():
            asked.append(True)
            return len(asked) > 2

        record = local_runs.Recording()
        with pytest.raises(StopRequested):
            local_runs.run(config, stop=stop, record=record)
        assert list(record.updates) == [1, 2]
        assert list(record.rollouts) == [1, 2]


class TestReports:
    def test_evaluations_and_checkpoints(self, whole):
        assert list(whole.evaluations) == [2, 4]
        assert all(name.startswith("val-") for name in whole.evaluations[2])
        assert list(whole.checkpoints) == [2, 4]

    def test_exported_weights_are_the_trained_ones(self, whole):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(Path(whole.checkpoints[4]) / ppo.MODEL_FOLDER)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, whole.weights[name], rtol=0, atol=0)

    def test_rollouts_carry_what_a_reader_wants(self, whole):
        for step, rows in whole.rollouts.items():
            assert len(rows) == 8
            for row in rows:
                assert list(row)[:3] == ["prompt", "response", "reward"]
                assert row["step"] == step
                assert row["prompt"].startswith("Say ")
                assert row["reward"] == min(1.0, sum(c.isdigit() for c in row["response"]) / 4)
                assert row["finish_reason"] in ("stop", "length")
                assert row["response_length"] == 16 or row["finish_reason"] == "stop"

    def test_mean_reward_is_verls(self, whole):
        for step, metrics in whole.updates.items():
            rewards = [row["reward"] for row in whole.rollouts[step]]
            assert metrics["critic/score/mean"] == pytest.approx(sum(rewards) / len(rewards), abs=1e-6)

    def test_what_is_loaded_is_told(self, whole):
        assert whole.phases == ["Initialising critic", "Initialising actor, reference and rollout engine"]

    def test_generation_is_timed(self, whole):
        assert all(metrics["timing_s/gen"] > 1e-3 for metrics in whole.updates.values())

    def test_no_cluster_was_started(self, whole):
        import ray

        assert not ray.is_initialized()


def group(uid, *rewards):
    return [{"uid": uid, "reward": reward} for reward in rewards]


class TestMeasures:
    @pytest.mark.parametrize(
        ("rows", "share"),
        [
            (group("a", 1.0, 1.0) + group("b", 0.0, 1.0), 0.5),
            (group("a", 1.0, 1.0, 1.0) + group("b", 0.0, 0.0), 1.0),
            (group("a", 0.1, 0.2) + group("b", 0.0, 1.0), 0.0),
            (group("a", 1.0) + group("b", 1.0), 0.0),
            (group("a", 1.0) + group("b", 1.0, 1.0), 1.0),
        ],
    )
    def test_dead_groups(self, rows, share):
        assert ppo.dead_group_share(rows) == share

    def test_log_ratio_by_hand(self):
        def jagged(*rows):
            return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)

        got = ppo.log_ratio_metrics(jagged([-1.0, -2.0], [-3.0]), jagged([-1.5, -5.0], [-1.0]))
        assert got["actor/ref_log_ratio_mean"] == pytest.approx((0.5 + 3.0 - 2.0) / 3)
        assert got["actor/ref_log_ratio_max"] == pytest.approx(3.0)
        assert all(math.isfinite(value) for value in got.values())
