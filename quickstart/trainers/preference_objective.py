"""One rl_type as the trainer needs it: how rows are grouped, what the loss reads, and what it reports.

Between the settings (arguments) and the formulas (losses). Not here: batches, the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from quickstart.arguments import REFERENCE_PREFERENCE_TYPES, RLArguments
from quickstart.errors import Fault, UserError
from quickstart.trainers import losses
from quickstart.trainers.losses import Metrics

ROW = "row"  # column: 2i for the chosen answer of pair i, 2i + 1 for the rejected one
REFERENCE = "reference"  # column: log-prob under the weights that training started from
KL = "kl"  # column: KTO's KL estimate of the row's block
LABEL = "label"  # column: 1 good, 0 bad


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A loss, bound to its settings."""

    rl: RLArguments
    desirable_weight: float = 1.0  # kto
    undesirable_weight: float = 1.0

    @property
    def group(self) -> int:
        """2: pairs; 1: labelled answers."""
        return 1 if self.uses_kl else 2

    @property
    def uses_kl(self) -> bool:
        """Whether rows are labelled and a KL estimate is needed."""
        return self.rl.rl_type == "kto"

    @property
    def uses_reference(self) -> bool:
        """Whether log-probs of the starting weights are needed."""
        return self.rl.rl_type in REFERENCE_PREFERENCE_TYPES and not self.rl.reference_free

    def __call__(
        self, sums: torch.Tensor, lengths: torch.Tensor, columns: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Metrics]:
        """Mean loss and metrics of some rows; the engine calls it for each micro batch.

        Args:
            sums: (rows,) log-probs of the answers under the policy.
            lengths: (rows,) tokens of the answers.
            columns: (rows,) each; see the names above.
        """
        return self._kto(sums, columns) if self.uses_kl else self._pairs(sums, lengths, columns)

    def _kto(self, sums: torch.Tensor, columns: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, Metrics]:
        return losses.kto_loss(
            sums,
            columns[REFERENCE].to(sums),
            columns[KL].to(sums),
            columns[LABEL].bool(),
            beta=self.rl.beta,  # type: ignore[arg-type]  # no "auto" in resolved settings
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
        )

    def _pairs(
        self, sums: torch.Tensor, lengths: torch.Tensor, columns: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Metrics]:
        # a pair that was torn apart would train on the wrong difference, in silence
        row = columns[ROW]
        assert bool((row[0::2] % 2 == 0).all() and (row[1::2] == row[0::2] + 1).all()), "pairs must stay together"
        chosen, rejected = sums[0::2], sums[1::2]
        chosen_lengths, rejected_lengths = lengths[0::2], lengths[1::2]
        answers = (chosen, rejected, chosen_lengths, rejected_lengths)
        rl = self.rl
        if rl.rl_type == "simpo":
            return losses.simpo_loss(*answers, beta=float(rl.beta), gamma=rl.simpo_gamma)
        if rl.rl_type == "orpo":
            return losses.orpo_loss(*answers, beta=float(rl.beta))
        reference = columns[REFERENCE].to(sums) if self.uses_reference else torch.zeros_like(sums)
        loss = partial(losses.dpo_loss, form=rl.dpo_loss, label_smoothing=rl.label_smoothing, beta=float(rl.beta))
        return loss(chosen, rejected, reference[0::2], reference[1::2], chosen_lengths, rejected_lengths)


def objective_of(rl: RLArguments, labels: Sequence[bool]) -> Objective:
    """The objective of a run. labels: of all training rows; kto's weights follow from their counts.

    Raises:
        UserError: settings that would be read by nobody.
    """
    if rl.rl_type == "dpo" and rl.label_smoothing > 0 and rl.dpo_loss != "sigmoid":
        rule = f"label smoothing belongs to the sigmoid loss, and rl.dpo_loss is {rl.dpo_loss}"
        fix = "set rl.label_smoothing=0, or rl.dpo_loss=sigmoid"
        raise UserError(Fault(field="rl.label_smoothing", found=str(rl.label_smoothing), rule=rule, fix=fix))
    if rl.rl_type != "kto":
        return Objective(rl=rl)
    good = sum(labels)
    wanted = [None if weight == "auto" else weight for weight in (rl.desirable_weight, rl.undesirable_weight)]
    desirable, undesirable = losses.kto_weights(good, len(labels) - good, *wanted)
    return Objective(rl=rl, desirable_weight=desirable, undesirable_weight=undesirable)


def averages(metrics: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Mean over the rows of a step; for labelled rows the margin is the difference of the means.

    A kind of rows that the step has none of is left out.
    """
    means = {name: sum(values) / len(values) for name, values in metrics.items() if len(values)}
    if "rewards/margins" not in means and {"rewards/chosen", "rewards/rejected"} <= means.keys():
        means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
    return means
