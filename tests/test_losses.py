"""Every loss, worked by hand for two rows; and the gradients' direction, the limits, and the balance of KTO's weights.

Not here: what the engine does with a loss (test_preference_parity.py).
"""

from __future__ import annotations

import math

import pytest
import torch

from quickstart.trainers.losses import dpo_loss, kto_loss, kto_weights, log_1_minus_exp, orpo_loss, simpo_loss


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


LENGTHS = column(2, 4), column(1, 4)
# chosen, rejected, reference chosen, reference rejected
PAIRS = column(-10, -20), column(-12, -16), column(-11, -18), column(-11, -19)


def check(metrics: dict[str, torch.Tensor], **wanted: list[float]) -> None:
    for name, values in wanted.items():
        assert metrics[name.replace("_", "/", 1)].tolist() == pytest.approx(values)


def test_dpo_sigmoid() -> None:
    """Two pairs, beta 0.5.

    pair 1: r_c = -10 + 11 = 1, r_r = -12 + 11 = -1, margin 0.5 x 2 = 1,     -log s(1)    = log(1 + e^-1)  = 0.313262
    pair 2: r_c = -20 + 18 = -2, r_r = -16 + 19 = 3, margin 0.5 x -5 = -2.5, -log s(-2.5) = log(1 + e^2.5) = 2.578890
    loss = (0.313262 + 2.578890) / 2 = 1.446076
    """
    loss, metrics = dpo_loss(*PAIRS, *LENGTHS, beta=0.5)
    assert loss.item() == pytest.approx(1.446076, abs=1e-6)
    check(metrics, rewards_chosen=[0.5, -1], rewards_rejected=[-0.5, 1.5], rewards_margins=[1, -2.5])
    check(metrics, rewards_accuracies=[1, 0], logps_chosen=[-10, -20], logps_rejected=[-12, -16])


def test_dpo_label_smoothing() -> None:
    """As above with e = 0.1: the other side's log is log(1 + e^1) = 1.313262 and log(1 + e^-2.5) = 0.078890.

    pair 1: 0.9 x 0.313262 + 0.1 x 1.313262 = 0.413262
    pair 2: 0.9 x 2.578890 + 0.1 x 0.078890 = 2.328890
    loss = 1.371076
    """
    loss, _ = dpo_loss(*PAIRS, *LENGTHS, beta=0.5, label_smoothing=0.1)
    assert loss.item() == pytest.approx(1.371076, abs=1e-6)


def test_dpo_hinge() -> None:
    """Margins 1 and -2.5: max(0, 1 - 1) = 0 and 1 + 2.5 = 3.5; loss = 1.75."""
    loss, _ = dpo_loss(*PAIRS, *LENGTHS, beta=0.5, form="hinge")
    assert loss.item() == pytest.approx(1.75)


def test_ipo() -> None:
    """Ratios per token, answers of 2 and 4 against 1 and 4 tokens, beta 0.5, so the target is 1 / (2 x 0.5) = 1.

    pair 1: 1 / 2 - (-1 / 1) = 1.5,   (1.5 - 1)^2 = 0.25
    pair 2: -2 / 4 - 3 / 4 = -1.25,   (-1.25 - 1)^2 = 5.0625
    loss = 2.65625
    """
    loss, metrics = dpo_loss(*PAIRS, *LENGTHS, beta=0.5, form="ipo")
    assert loss.item() == pytest.approx(2.65625)
    check(metrics, rewards_margins=[1, -2.5])


def test_reference_free_dpo() -> None:
    """Reference 0: margins 0.5 x (-10 + 12) = 1 and 0.5 x (-20 + 16) = -2; log(1 + e^-1) = 0.313262,
    log(1 + e^2) = 2.126928, loss = 1.220095.
    """
    zero = column(0, 0)
    loss, _ = dpo_loss(PAIRS[0], PAIRS[1], zero, zero, *LENGTHS, beta=0.5)
    assert loss.item() == pytest.approx(1.220095, abs=1e-6)


def test_dpo_starts_at_log_2() -> None:
    """Policy equal to reference: every margin is 0."""
    chosen, rejected, *_ = PAIRS
    loss, metrics = dpo_loss(chosen, rejected, chosen, rejected, *LENGTHS, beta=0.1)
    assert loss.item() == pytest.approx(math.log(2))
    check(metrics, rewards_accuracies=[0, 0])


def test_kto() -> None:
    """One good and one bad row, beta 0.5, z = 1 and 2, weights 1.2 and 0.8.

    good: r = -10 + 12 = 2,  1.2 x (1 - s(0.5 x (2 - 1)))  = 1.2 x (1 - 0.622459) = 0.453049
    bad:  r = -20 + 19 = -1, 0.8 x (1 - s(0.5 x (2 + 1)))  = 0.8 x (1 - 0.817574) = 0.145941
    loss = 0.299495
    """
    loss, metrics = kto_loss(
        column(-10, -20),
        column(-12, -19),
        column(1, 2),
        torch.tensor([True, False]),
        beta=0.5,
        desirable_weight=1.2,
        undesirable_weight=0.8,
    )
    assert loss.item() == pytest.approx(0.299495, abs=1e-6)
    check(metrics, rewards_chosen=[1], rewards_rejected=[-0.5], logps_chosen=[-10], logps_rejected=[-20])
    assert metrics["kl"].tolist() == [1, 2]


def test_kto_with_one_kind_only() -> None:
    """All rows bad: a number, and nothing under chosen."""
    rows = column(-10, -20)
    loss, metrics = kto_loss(rows, rows, column(0, 0), torch.tensor([False, False]), beta=0.1)
    assert loss.item() == pytest.approx(0.5)
    assert metrics["rewards/chosen"].numel() == 0


def test_kto_gradient_does_not_pass_the_kl() -> None:
    kl = column(0.5, 0.5).requires_grad_()
    policy = column(-10, -20).requires_grad_()
    loss, _ = kto_loss(policy, column(-11, -19), kl, torch.tensor([True, False]), beta=0.5)
    loss.backward()
    assert kl.grad is None
    assert policy.grad is not None
    assert policy.grad[0] < 0 < policy.grad[1]  # a step against the gradient raises the good one and lowers the bad one


def test_simpo() -> None:
    """Log-probs per token, beta 2, gamma 1.

    pair 1: 2 x (-10 / 2 - -12 / 1) - 1 = 2 x 7 - 1 = 13,     log(1 + e^-13) = 0.00000226
    pair 2: 2 x (-20 / 4 - -16 / 4) - 1 = 2 x -1 - 1 = -3,    log(1 + e^3)   = 3.048587
    loss = 1.524295
    """
    loss, metrics = simpo_loss(PAIRS[0], PAIRS[1], *LENGTHS, beta=2.0, gamma=1.0)
    assert loss.item() == pytest.approx(1.524295, abs=1e-6)
    check(metrics, rewards_chosen=[-10, -10], rewards_rejected=[-24, -8], rewards_accuracies=[1, 0])


def test_orpo() -> None:
    """Answers of 2 tokens each with per-token log-probs log 0.5 and log 0.25 (pair 1), and swapped (pair 2); beta 0.1.

    odds of 0.5: 1; odds of 0.25: 1/3; log of the ratio: log 3 = 1.098612 (pair 1), -1.098612 (pair 2)
    pair 1: -log 0.5  - 0.1 log s(1.098612)  = 0.693147 - 0.1 log 0.75 = 0.693147 + 0.028768 = 0.721915
    pair 2: -log 0.25 - 0.1 log s(-1.098612) = 1.386294 - 0.1 log 0.25 = 1.386294 + 0.138629 = 1.524924
    loss = 1.123420
    """
    half, quarter = 2 * math.log(0.5), 2 * math.log(0.25)
    two = column(2, 2)
    loss, metrics = orpo_loss(column(half, quarter), column(quarter, half), two, two, beta=0.1)
    assert loss.item() == pytest.approx(1.123420, abs=1e-6)
    assert metrics["log_odds_chosen"].tolist() == pytest.approx([math.log(3), -math.log(3)])
    assert metrics["nll_loss"].tolist() == pytest.approx([-math.log(0.5), -math.log(0.25)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_1_minus_exp_at_its_ends(dtype: torch.dtype) -> None:
    """Near 0 it is log(-x), far below it is -e^x; at 0 itself still finite, with a finite gradient."""
    x = torch.tensor([-1e-6, -0.6931472, -40.0, 0.0], dtype=dtype, requires_grad=True)
    out = log_1_minus_exp(x)
    out.sum().backward()
    assert out[0].item() == pytest.approx(math.log(1e-6), rel=1e-5)
    assert out[1].item() == pytest.approx(math.log(0.5), rel=1e-5)
    assert out[2].item() == pytest.approx(-math.exp(-40), rel=1e-5)
    assert torch.isfinite(out).all()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize(
    ("good", "bad", "wanted"),
    [(100, 100, (1, 1)), (90, 10, (1, 6.75)), (10, 90, (9, 1)), (130, 100, (1, 1)), (40, 60, (1.5, 1))],
)
def test_kto_weights_from_counts(good: int, bad: int, wanted: tuple[float, float]) -> None:
    """9:1 needs w_u = 90 / (10 x 4/3) = 6.75; 1:9 needs w_d = 9; 1:1 and 13:10 are within 1:1 to 4:3 as they are."""
    weights = kto_weights(good, bad)
    assert weights == pytest.approx(wanted)
    assert 1 - 1e-9 <= weights[0] * good / (weights[1] * bad) <= 4 / 3 + 1e-9


def test_kto_weights_leave_what_was_given() -> None:
    assert kto_weights(90, 10, 2.0, 3.0) == (2.0, 3.0)
    assert kto_weights(90, 10, 1.0, None) == pytest.approx((1.0, 6.75))
    assert kto_weights(10, 90, None, 2.0) == pytest.approx((18.0, 2.0))
    assert kto_weights(10, 90, 1.0, None) == pytest.approx((1.0, 1 / 9))
