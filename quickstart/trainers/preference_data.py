"""A preference run's rows, from the data room's text to token ids with counts, weights and notices. No torch training.

Not here: how one row becomes tokens (preference_batches.py), what a loss makes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quickstart.arguments import RunConfig
from quickstart.trainers.preference_batches import (
    Encoded,
    LabelledRow,
    Limits,
    PairRow,
    check_both_kinds,
    encode_labelled,
    encode_pairs,
    shuffled,
)
from quickstart.trainers.preference_objective import Objective, objective_of
from quickstart.words import counted

Rows = Sequence[PairRow] | Sequence[LabelledRow]


@dataclass(frozen=True, kw_only=True)
class PreferenceData:
    """A run's rows as tokens. Made by :func:`encode`, before anything heavy is loaded."""

    train: Encoded
    evaluation: Encoded | None
    rows: Rows  # the evaluation rows, or the training rows where there are none: prompts for samples
    objective: Objective
    notices: list[str]


def encode(cfg: RunConfig, tokenizer: Any, train: Rows, evaluation: Rows, positions: int) -> PreferenceData:
    """Tokens, counts and weights of a run.

    Args:
        cfg: resolved settings.
        train, evaluation: rows of the data room: pairs, or labelled answers for kto; evaluation may be empty.
        positions: longest sequence that the model can read.

    Raises:
        UserError: rows that nothing can be learned from, or settings that do not fit.
    """
    encode_rows: Callable[..., Encoded] = encode_labelled if cfg.rl.rl_type == "kto" else encode_pairs
    limits = Limits(
        prompt=cfg.data.max_prompt_length,
        answer=cfg.data.max_response_length,
        positions=positions,
        overlong=cfg.data.overlong,
    )
    encoded = encode_rows(train, tokenizer, limits)
    held_out = encode_rows(evaluation, tokenizer, limits) if evaluation else None
    if cfg.rl.rl_type == "kto":
        check_both_kinds(encoded.labels, "data.train_file")
        encoded = mixed(encoded, cfg.training.seed) if cfg.data.shuffle else encoded
        if held_out is not None:
            check_both_kinds(held_out.labels, "data.eval_file")
    objective = objective_of(cfg.rl, encoded.labels)
    return PreferenceData(
        train=encoded,
        evaluation=held_out,
        rows=evaluation or train,
        objective=objective,
        notices=notices_of(cfg, encoded, objective),
    )


def mixed(encoded: Encoded, seed: int) -> Encoded:
    """Rows in a new order, once: later epochs move whole blocks, since a KL estimate belongs to a block."""
    order = shuffled(len(encoded.rows), seed)
    return Encoded(
        rows=[encoded.rows[i] for i in order],
        group=encoded.group,
        labels=[encoded.labels[i] for i in order],
        cut_answers=encoded.cut_answers,
    )


def notices_of(cfg: RunConfig, encoded: Encoded, objective: Objective) -> list[str]:
    """What the user should know before it starts."""
    lines = []
    if encoded.cut_answers:
        limit = cfg.data.max_response_length
        lines.append(f"{counted(encoded.cut_answers, 'answer')} cut to data.max_response_length={limit} tokens")
    if cfg.rl.rl_type == "kto":
        good = sum(encoded.labels)
        lines.append(
            f"KTO: {good} good and {counted(len(encoded.labels) - good, 'bad answer')}, "
            f"weights {objective.desirable_weight:.3g} and {objective.undesirable_weight:.3g}"
        )
    return lines
