"""What a trainer watches: gradients that stay non-finite, rewards that cannot teach."""

from __future__ import annotations

import pytest

from quickstart.errors import RunError
from quickstart.trainers.watch import NON_FINITE_LIMIT, GradientWatch, RewardWatch


class TestGradients:
    def test_non_finite_updates_in_a_row_end_the_run_with_the_remedy(self):
        watch = GradientWatch(("actor/grad_norm",), "lower the learning rate")
        for step in range(1, NON_FINITE_LIMIT):
            watch.look(step, {"actor/grad_norm": float("nan")})
        with pytest.raises(RunError, match="lower the learning rate"):
            watch.look(NON_FINITE_LIMIT, {"actor/grad_norm": float("inf")})

    def test_a_finite_update_between_them_starts_the_count_anew(self):
        watch = GradientWatch(("grad_norm",), "-")
        for step in range(1, 10):
            watch.look(step, {"grad_norm": 1.0 if step % NON_FINITE_LIMIT == 0 else float("nan")})

    def test_metrics_without_gradient_norms_are_no_fault(self):
        GradientWatch(("grad_norm",), "-").look(1, {"loss": float("nan")})


class TestRewards:
    def test_a_constant_reward_is_told_once_after_three_steps(self):
        told: list[str] = []
        watch = RewardWatch(told.append)
        for _ in range(5):
            watch.look([0.5, 0.5], 0.0)
        assert len(told) == 1
        assert "0.5 for every answer of the first 3 steps" in told[0]

    def test_a_reward_that_varies_between_steps_is_not_told(self):
        told: list[str] = []
        watch = RewardWatch(told.append)
        for value in (0.5, 0.5, 0.6):
            watch.look([value, value], 0.0)
        assert told == []

    def test_dead_groups_are_told_once_above_eighty_percent(self):
        told: list[str] = []
        watch = RewardWatch(told.append)
        watch.look([0.0, 1.0], 0.8)
        assert told == []
        watch.look([0.0, 1.0], 0.9)
        watch.look([0.0, 1.0], 1.0)
        assert len(told) == 1
        assert "in 90% of the groups" in told[0]
