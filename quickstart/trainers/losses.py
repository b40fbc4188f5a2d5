"""Preference losses as pure functions: summed log-probs in, (loss, metrics) out. Formula and paper stand at each one.

Shapes: (pairs,) or (rows,) tensors of one float type. A log-prob is that of a whole answer given its prompt, summed
over the answer's tokens. loss is a scalar, the mean over what was given; metrics are detached tensors with one value a
pair (or row), named as TRL names them, to be averaged by whoever collects them. Not here: batches, engines, gradients'
accumulation.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812  (as torch's documentation has it)

Metrics = dict[str, torch.Tensor]
DPOForm = Literal["sigmoid", "ipo", "hinge"]

# KTO paper, section 4.2: weight x count of good against bad answers belongs between these.
BALANCE_LOW, BALANCE_HIGH = 1.0, 4 / 3


def pair_metrics(
    chosen: torch.Tensor, rejected: torch.Tensor, chosen_reward: torch.Tensor, rejected_reward: torch.Tensor
) -> Metrics:
    """What every pair loss reports: implicit rewards, their margin, how often chosen wins, and log-probs."""
    values = {
        "rewards/chosen": chosen_reward,
        "rewards/rejected": rejected_reward,
        "rewards/margins": chosen_reward - rejected_reward,
        "rewards/accuracies": (chosen_reward > rejected_reward).to(chosen.dtype),
        "logps/chosen": chosen,
        "logps/rejected": rejected,
    }
    return {name: value.detach() for name, value in values.items()}


def dpo_loss(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    reference_chosen: torch.Tensor,
    reference_rejected: torch.Tensor,
    chosen_lengths: torch.Tensor,
    rejected_lengths: torch.Tensor,
    *,
    beta: float,
    form: DPOForm = "sigmoid",
    label_smoothing: float = 0.0,
) -> tuple[torch.Tensor, Metrics]:
    """Direct preference optimization and its two nearest relatives.

    With r = log policy - log reference of an answer (reference 0 where reference-free):

        sigmoid  -(1 - e) log s(b (r_c - r_r)) - e log s(-b (r_c - r_r))    Rafailov et al. 2023, arXiv 2305.18290;
                                                                    e: conservative DPO, Mitchell 2023 (cdpo.pdf)
        hinge    max(0, 1 - b (r_c - r_r))                                  SLiC-HF, Zhao et al. 2023, arXiv 2305.10425
        ipo      (r_c / |c| - r_r / |r| - 1 / (2 b))^2                      Azar et al. 2023, arXiv 2310.12036, eq. 17

    IPO's ratios are per token (|c|, |r|: tokens of the answers), as its authors confirmed to TRL and as TRL has it.

    Args:
        chosen, rejected, reference_chosen, reference_rejected: (pairs,) summed log-probs.
        chosen_lengths, rejected_lengths: (pairs,) tokens of the answers; read by ipo only.
        beta: strength of the pull to the reference, above 0.
        label_smoothing: e, read by sigmoid only.

    Returns:
        loss (scalar) and metrics; rewards are b r, without a gradient.
    """
    chosen_ratio, rejected_ratio = chosen - reference_chosen, rejected - reference_rejected
    margin = beta * (chosen_ratio - rejected_ratio)
    if form == "sigmoid":
        losses = -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)
    elif form == "hinge":
        losses = torch.relu(1 - margin)
    else:
        losses = (chosen_ratio / chosen_lengths - rejected_ratio / rejected_lengths - 1 / (2 * beta)) ** 2
    return losses.mean(), pair_metrics(chosen, rejected, beta * chosen_ratio, beta * rejected_ratio)


def kto_loss(
    policy: torch.Tensor,
    reference: torch.Tensor,
    kl: torch.Tensor,
    labels: torch.Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> tuple[torch.Tensor, Metrics]:
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv 2402.01306, eq. 7 and 8).

        good answers  w_d (1 - s(b (r - z)))        bad answers  w_u (1 - s(b (z - r)))

    with r = log policy - log reference, and z the KL estimate from mismatched answers: no gradient, never negative.

    Args:
        policy, reference: (rows,) summed log-probs.
        kl: (rows,) z of each row's block.
        labels: (rows,) bool, True for a good answer.
        beta: strength of the pull to the reference, above 0.

    Returns:
        loss (scalar) and metrics: values of the good rows under `chosen`, of the bad ones under `rejected`; either may
        be empty.
    """
    ratio, z = policy - reference, kl.detach()
    good = desirable_weight * (1 - torch.sigmoid(beta * (ratio - z)))
    bad = undesirable_weight * (1 - torch.sigmoid(beta * (z - ratio)))
    rewards, log_probs = (beta * ratio).detach(), policy.detach()
    metrics = {
        "rewards/chosen": rewards[labels],
        "rewards/rejected": rewards[~labels],
        "logps/chosen": log_probs[labels],
        "logps/rejected": log_probs[~labels],
        "kl": z,  # cut off at 0 already, as TRL logs it
    }
    return torch.where(labels, good, bad).mean(), metrics


def simpo_loss(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    chosen_lengths: torch.Tensor,
    rejected_lengths: torch.Tensor,
    *,
    beta: float,
    gamma: float,
) -> tuple[torch.Tensor, Metrics]:
    """SimPO: no reference, log-probs per token, a target margin (Meng et al. 2024, arXiv 2405.14734, eq. 6).

        -log s(b (log p_c / |c| - log p_r / |r|) - g)

    Args:
        chosen, rejected: (pairs,) summed log-probs; the lengths (pairs,) are tokens of the answers.
        beta: scale of the rewards, usually 2 to 2.5.
        gamma: the margin that is asked for.
    """
    chosen_reward, rejected_reward = beta * chosen / chosen_lengths, beta * rejected / rejected_lengths
    losses = -F.logsigmoid(chosen_reward - rejected_reward - gamma)
    return losses.mean(), pair_metrics(chosen, rejected, chosen_reward, rejected_reward)


def orpo_loss(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    chosen_lengths: torch.Tensor,
    rejected_lengths: torch.Tensor,
    *,
    beta: float,
) -> tuple[torch.Tensor, Metrics]:
    """ORPO: fine-tuning on the chosen answer plus an odds ratio, no reference (Hong et al. 2024, arXiv 2403.07691).

        -l_c - b log s(log odds_c - log odds_r),   log odds = l - log(1 - e^l),   l = log p / |answer|     (eq. 6 and 7)

    The first term is over the answer's tokens, as in the paper; TRL's ORPOTrainer has it over the prompt's too.

    Args:
        chosen, rejected: (pairs,) summed log-probs; the lengths (pairs,) are tokens of the answers.
        beta: weight of the odds ratio, lambda in the paper.
    """
    chosen_mean, rejected_mean = chosen / chosen_lengths, rejected / rejected_lengths
    odds = (chosen_mean - rejected_mean) - (log_1_minus_exp(chosen_mean) - log_1_minus_exp(rejected_mean))
    ratio = F.logsigmoid(odds)
    metrics = pair_metrics(chosen, rejected, beta * chosen_mean, beta * rejected_mean)
    metrics |= {"nll_loss": -chosen_mean.detach(), "log_odds_chosen": odds.detach(), "log_odds_ratio": ratio.detach()}
    return (-chosen_mean - beta * ratio).mean(), metrics


def log_1_minus_exp(x: torch.Tensor) -> torch.Tensor:
    """log(1 - e^x) for x <= 0, exact at both ends (Maechler 2012, log1mexp); 0 is taken as the nearest number below."""
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    near_zero = x > -0.6931472
    # each branch gets a harmless number where the other counts, so that no gradient is 0 times infinity
    close = torch.log(-torch.expm1(torch.where(near_zero, x, -1.0)))
    far = torch.log1p(-torch.exp(torch.where(near_zero, -1.0, x)))
    return torch.where(near_zero, close, far)


def kto_weights(
    desirable: int, undesirable: int, desirable_weight: float | None = None, undesirable_weight: float | None = None
) -> tuple[float, float]:
    """Weights that keep (w_d x good rows) : (w_u x bad rows) between 1:1 and 4:3, as the KTO paper asks (section 4.2).

    Args:
        desirable, undesirable: numbers of good and bad rows, 1 or more each.
        desirable_weight, undesirable_weight: what was given; None is chosen here. Given ones are never changed.

    Returns:
        (w_d, w_u). Where nothing was given, the rarer kind is raised and the other is 1.
    """
    given_d, given_u = desirable_weight, undesirable_weight
    ratio = (given_d or 1.0) * desirable / ((given_u or 1.0) * undesirable)
    wanted = min(max(ratio, BALANCE_LOW), BALANCE_HIGH)
    if given_d is not None and given_u is not None:
        return given_d, given_u
    if given_d is not None or (given_u is None and ratio > BALANCE_HIGH):
        return given_d or 1.0, ratio / wanted
    return wanted / ratio, given_u or 1.0
