"""Every advantage estimator that verl 0.9.1 registers, on the local backend: two steps each, or the reason why not."""

import functools
import inspect
import math

import local_runs
import pytest

from quickstart.arguments import ESTIMATORS
from quickstart.config.rules import NOT_IN_V1
from quickstart.errors import UserError

# These need what verl's V1 trainer does not hand to its estimators, local or on Ray.
IMPOSSIBLE = {
    "remax": "reward_baselines",  # core_algos.py: of a greedy answer, which is never generated
    "gdpo": "gdpo_reward_keys",  # one column a reward; V1 keeps their sum only (trainer_base.py:1745)
    "optimal_token_baseline": "sum_pi_squared",  # never read from the queue (trainer_base.py:1745)
    "tir_optimal_token_baseline": "sum_pi_squared",
}
POSSIBLE = sorted(set(ESTIMATORS) - set(NOT_IN_V1))


@pytest.fixture(scope="module")
def train(tiny_tied, sums, tmp_path_factory, process_variables):
    @functools.cache
    def train(rl_type):
        rl = {"rl_type": rl_type, "rollout_batch_size": 4, "per_device_train_batch_size": 4, "kl_coef": 0.01}
        cfg = local_runs.settings(tiny_tied, rl=rl, data={"max_response_length": 8})
        return local_runs.run(local_runs.verl_config_of(cfg, sums, tmp_path_factory.mktemp(rl_type), steps=2))

    return train


class TestPossible:
    @pytest.mark.parametrize("rl_type", POSSIBLE)
    def test_two_steps_move_the_policy(self, train, rl_type):
        record = train(rl_type)
        assert list(record.updates) == [1, 2]
        for metrics in record.updates.values():
            assert all(math.isfinite(value) for value in metrics.values())
            assert metrics["actor/grad_norm"] > 1e-3
            assert metrics["critic/advantages/max"] > metrics["critic/advantages/min"]
        assert record.updates[1]["actor/ref_log_ratio_max"] < 1e-5 < record.updates[2]["actor/ref_log_ratio_max"]

    def test_all_but_the_impossible_are_tried(self):
        from verl.trainer.ppo.core_algos import AdvantageEstimator

        assert {e.value for e in AdvantageEstimator} == set(ESTIMATORS.values())
        assert set(IMPOSSIBLE) == set(NOT_IN_V1)

    def test_one_critic(self, train):
        assert [name for name in ("ppo", "grpo") if "critic/vf_loss" in train(name).updates[1]] == ["ppo"]


class TestImpossible:
    @pytest.mark.parametrize("rl_type", sorted(IMPOSSIBLE))
    def test_verls_v1_trainer_never_fetches_what_it_needs(self, rl_type):
        from verl.trainer.ppo.v1 import trainer_base

        assert IMPOSSIBLE[rl_type] not in inspect.getsource(trainer_base)

    @pytest.mark.parametrize("rl_type", sorted(IMPOSSIBLE))
    def test_refused_before_anything_starts(self, tiny_tied, rl_type):
        with pytest.raises(UserError, match=rl_type):
            local_runs.settings(tiny_tied, rl={"rl_type": rl_type})
