"""What a trainer watches: gradients that stay non-finite, rewards that cannot teach."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from quickstart.errors import RunError
from quickstart.trainers.watch import NON_FINITE_LIMIT, GradientWatch, RewardWatch


class TestGradients:
    def test_non_finite_updates_in_a_row_end_the_run_with_the_remedy(self):
        watch = GradientWatch({"actor/grad_norm": "actor/loss"}, "lower the learning rate")
        for step in range(1, NON_FINITE_LIMIT):
            watch.look(step, {"actor/grad_norm": float("nan")})
        with pytest.raises(RunError, match="lower the learning rate"):
            watch.look(NON_FINITE_LIMIT, {"actor/grad_norm": float("inf")})

    def test_a_finite_update_between_them_starts_the_count_anew(self):
        watch = GradientWatch({"grad_norm": "loss"}, "-")
        for step in range(1, 10):
            watch.look(step, {"grad_norm": 1.0 if step % NON_FINITE_LIMIT == 0 else float("nan")})

    def test_metrics_without_gradient_norms_are_no_fault(self):
        GradientWatch({"grad_norm": "loss"}, "-").look(1, {"loss": 1.0})

    def test_a_loss_that_is_not_finite_from_the_start_ends_the_run_at_once(self):
        with pytest.raises(RunError, match="before the first update"):
            GradientWatch({"grad_norm": "loss"}, "-").look(1, {"loss": math.nan, "grad_norm": math.nan})


def look_at(watch, *losses):
    """A step for each loss, all with gradients that are not finite."""
    for step, loss in enumerate(losses, start=1):
        watch.look(step, {"grad_norm": math.inf, "loss": loss})


class TestLossScale:
    """float16: torch's scaler starts at 65,536 and halves at each update that it skips."""

    def watch(self, scales):
        told: list[str] = []
        scaler = SimpleNamespace(get_scale=lambda: scales.pop(0))
        return GradientWatch({"grad_norm": "loss"}, "use float32", lambda _: scaler, told.append), told

    def test_its_first_skips_are_told_and_no_fault(self):
        watch, told = self.watch([2.0**n for n in range(15, 8, -1)])
        for step in range(1, 8):
            watch.look(step, {"grad_norm": math.inf, "loss": 0.7})
        watch.look(8, {"grad_norm": 1.0, "loss": 0.7})
        assert len(told) == 7
        assert told[0] == "Step 1: update skipped, grad_norm not finite in float16; loss scale now 32768"

    def test_once_it_is_down_skips_count(self):
        watch, told = self.watch([2.0**n for n in range(15, -10, -1)])
        with pytest.raises(RunError, match=f"step {12 + NON_FINITE_LIMIT}: grad_norm.*\n.*fix: use float32"):
            look_at(watch, *[0.7] * 30)
        assert len(told) == 12

    def test_a_loss_that_is_not_finite_counts_at_once(self):
        watch, told = self.watch([2.0**15] * 3)
        with pytest.raises(RunError, match=f"step {NON_FINITE_LIMIT + 1}"):
            look_at(watch, 0.7, *[math.nan] * 30)
        assert len(told) == 1, "the first one, of which the scale alone can have been the cause"

    def test_a_skip_for_the_scale_does_not_hide_a_fault(self):
        watch, _ = self.watch([2.0**15] * 30)
        with pytest.raises(RunError, match="step 6"):
            look_at(watch, 0.7, math.nan, 0.7, math.nan, 0.7, math.nan)


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
