"""From preference rows to token ids, and which rows make up which step. No torch, no engine.

An answer is what the chat template makes of the assistant's message after the prompt, its end mark included, so that
the model learns to stop. Rows are kept as they come: pair i is the rows 2i (chosen) and 2i + 1 (rejected).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Protocol

from quickstart.data.rows import Message
from quickstart.errors import Fault, UserError

SHOWN_FAULTS = 10  # of one kind of rows; more are counted


class Placed(Protocol):
    """Any row of the data room: it knows its prompt and where it stands."""

    @property
    def prompt(self) -> list[Message]: ...
    @property
    def file(self) -> str: ...
    @property
    def line(self) -> int: ...


class PairRow(Placed, Protocol):
    """data.prepare.Pair."""

    @property
    def chosen(self) -> str: ...
    @property
    def rejected(self) -> str: ...


class LabelledRow(Placed, Protocol):
    """data.prepare.Labelled."""

    @property
    def completion(self) -> str: ...
    @property
    def label(self) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a row may be, in tokens."""

    prompt: int
    answer: int
    positions: int  # of the model; prompt and answer together
    overlong: Literal["stop", "drop", "truncate"]  # truncate: prompts are cut from the left, else they are a fault


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRow:
    """One prompt with one answer, as token ids."""

    prompt: list[int]
    answer: list[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """All rows of a file as tokens. group: rows that belong together, 2 for pairs, else 1."""

    rows: list[TokenRow]
    group: int
    labels: list[bool]  # pairs: chosen, rejected, chosen, ...
    cut_answers: int  # answers that were cut to the limit, and so have lost their end mark

    def __len__(self) -> int:
        """Pairs, or rows."""
        return len(self.rows) // self.group


def encode_pairs(rows: Sequence[PairRow], tokenizer: Any, limits: Limits) -> Encoded:
    """Pairs as tokens. Both answers of a pair get the same prompt.

    Raises:
        UserError: all rows that cannot be used, with file and line: no room for an answer, or two answers that are the
            same (as text, or after they were cut).
    """
    all_chosen = _full_ids(tokenizer, rows, [row.chosen for row in rows])
    all_rejected = _full_ids(tokenizer, rows, [row.rejected for row in rows])
    encoded: list[TokenRow] = []
    faults, cut = [], 0
    for row, prompt, chosen, rejected in zip(rows, _prompt_ids(tokenizer, rows), all_chosen, all_rejected, strict=True):
        start = min(common_prefix(prompt, chosen), common_prefix(prompt, rejected))
        answers = [chosen[start:], rejected[start:]]
        fitted = fit(prompt[:start], answers, limits)
        fault = _fault(row, prompt[:start], answers, fitted, limits)
        if fault is None and fitted is not None:
            encoded += fitted
            cut += sum(len(t.answer) < len(a) for t, a in zip(fitted, answers, strict=True))
        elif fault is not None:
            faults.append(fault)
    raise_all(faults)
    return Encoded(rows=encoded, group=2, labels=[True, False] * (len(encoded) // 2), cut_answers=cut)


def encode_labelled(rows: Sequence[LabelledRow], tokenizer: Any, limits: Limits) -> Encoded:
    """Labelled answers as tokens.

    Raises:
        UserError: rows without room for an answer; or all labels are the same.
    """
    whole = _full_ids(tokenizer, rows, [row.completion for row in rows])
    encoded: list[TokenRow] = []
    faults, cut = [], 0
    for row, prompt, full in zip(rows, _prompt_ids(tokenizer, rows), whole, strict=True):
        start = common_prefix(prompt, full)
        fitted = fit(prompt[:start], [full[start:]], limits)
        fault = _fault(row, prompt[:start], [full[start:]], fitted, limits)
        if fault is None and fitted is not None:
            encoded += fitted
            cut += len(fitted[0].answer) < len(full) - start
        elif fault is not None:
            faults.append(fault)
    raise_all(faults)
    return Encoded(rows=encoded, group=1, labels=[row.label for row in rows], cut_answers=cut)


def check_both_kinds(labels: Sequence[bool], field: str) -> None:
    """KTO compares good with bad answers: raises UserError where one kind is missing."""
    if len(set(labels)) == 2:
        return
    kind = "good" if labels[0] else "bad"
    rule = "KTO needs good and bad answers; with one kind only it pushes all answers one way"
    fix = "add rows with the other label, or check data.columns.label"
    raise UserError(Fault(field=field, found=f"{len(labels)} answers, all labelled {kind}", rule=rule, fix=fix))


def fit(prompt: list[int], answers: list[list[int]], limits: Limits) -> list[TokenRow] | None:
    """The rows within the limits: prompts cut from the left, answers from the right. None where no answer is left.

    The prompt gives way first, down to nothing but one token; then the answers.
    """
    if len(prompt) > limits.prompt:
        if limits.overlong != "truncate":
            return None
        prompt = prompt[-limits.prompt :]
    answers = [answer[: limits.answer] for answer in answers]
    room = limits.positions - len(prompt)
    if room < 1 or not prompt or not all(answers):
        return None
    return [TokenRow(prompt=prompt, answer=answer[:room]) for answer in answers]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids are the same at the start; an answer begins where prompt and conversation part."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def block_edges(count: int, block: int) -> list[int]:
    """Where blocks of rows begin and end; a last block of one row, with nothing to rotate, joins the others."""
    edges = [*range(0, count, block), count]
    if len(edges) > 2 and edges[-1] - edges[-2] == 1:
        del edges[-2]
    return edges


def rotate(rows: Sequence[TokenRow], block: int) -> list[TokenRow]:
    """Each prompt with the answer of the row before it in its block, the first with the last: mismatched on purpose.

    KTO's KL is estimated on these (arXiv 2402.01306, section 4.1).
    """
    edges = block_edges(len(rows), block)
    mixed = []
    for start, end in pairwise(edges):
        answers = [rows[end - 1].answer, *(row.answer for row in rows[start : end - 1])]
        prompts = [row.prompt for row in rows[start:end]]
        mixed += [TokenRow(prompt=p, answer=a) for p, a in zip(prompts, answers, strict=True)]
    return mixed


def shuffled(count: int, seed: int) -> list[int]:
    """0 to count - 1 in an order that only the seed decides."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


def steps_of(count: int, *, steps: int, size: int, block: int, seed: int | None) -> list[list[int]]:
    """Which units (pairs, or blocks' rows) each step trains on; an epoch's rest that fills no step is left out.

    Args:
        count: units there are.
        size: units of one step, a multiple of block.
        block: units that stay together, in their order: KTO's KL belongs to a block. 1: each goes its own way.
        seed: a new order in each epoch; None: the order of the file, each time.
    """
    blocks, per_step = count // block, size // block
    per_epoch = blocks // per_step
    assert per_epoch > 0, "config.check_steps has counted"
    plan: list[list[int]] = []
    epoch = 0
    while len(plan) < steps:
        order = list(range(blocks)) if seed is None else shuffled(blocks, seed + epoch)
        for s in range(min(per_epoch, steps - len(plan))):
            chosen = order[s * per_step : (s + 1) * per_step]
            plan.append([b * block + i for b in chosen for i in range(block)])
        epoch += 1
    return plan


def _prompt_ids(tokenizer: Any, rows: Sequence[Placed]) -> list[list[int]]:
    texts = [tokenizer.apply_chat_template(row.prompt, add_generation_prompt=True, tokenize=False) for row in rows]
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def _full_ids(tokenizer: Any, rows: Sequence[Placed], answers: Sequence[str]) -> list[list[int]]:
    texts = [
        tokenizer.apply_chat_template([*row.prompt, {"role": "assistant", "content": answer}], tokenize=False)
        for row, answer in zip(rows, answers, strict=True)
    ]
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def _fault(
    row: Placed, prompt: list[int], answers: list[list[int]], fitted: list[TokenRow] | None, limits: Limits
) -> Fault | None:
    place = f"{row.file}:{row.line}"
    if fitted is None and not all(answers):
        fix = "check the model's chat template: it drops the assistant's message"
        return Fault(field=place, found="an answer without tokens", rule="there must be something to learn", fix=fix)
    if fitted is None:
        longest = min(limits.prompt, limits.positions - 1)
        return Fault(
            field=place,
            found=f"a prompt of {len(prompt)} tokens",
            rule=f"at most {longest} leave room for an answer (data.max_prompt_length={limits.prompt}, "
            f"the model's positions: {limits.positions})",
            fix="shorten it, leave the row out, or set data.overlong=truncate",
        )
    if len(fitted) == 2 and fitted[0].answer == fitted[1].answer:
        same = answers[0] == answers[1]
        found = "the same answer as chosen and rejected" if same else "answers that differ only after the cut"
        fix = "leave the row out" if same else f"set data.max_response_length>{limits.answer}, or leave the row out"
        return Fault(field=place, found=found, rule="there is nothing to prefer", fix=fix)
    return None


def raise_all(faults: Sequence[Fault]) -> None:
    """All faulty rows in one UserError; of many, the first ones and how many more."""
    if not faults:
        return
    shown = list(faults[:SHOWN_FAULTS])
    if len(faults) > SHOWN_FAULTS:
        more = len(faults) - SHOWN_FAULTS
        shown.append(Fault(field="data", found=f"{more} more such rows", rule="as above", fix="as above"))
    raise UserError(shown)
