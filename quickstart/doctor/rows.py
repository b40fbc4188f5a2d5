"""The rows of a run as the doctor sees them: how many, what was left out, and how long they are in tokens.

Reading and checking is the data room's (quickstart.data); this looks at what it wrote. Not here: rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from quickstart import data
from quickstart.arguments import PREFERENCE_TYPES, RunConfig
from quickstart.data.lengths import render, token_counts
from quickstart.data.rows import Message
from quickstart.doctor.finding import Finding, note, ok
from quickstart.words import counted

MEASURED_ROWS = 1000  # lengths are taken of the first so many rows
BINS = 8
Found = data.Prepared | data.Examples[data.Pair] | data.Examples[data.Labelled]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One training row with its answers, and what a reward is called with."""

    prompt: list[Message]
    chosen: str | None
    rejected: str | None
    place: str  # file:line
    data_source: str = ""
    ground_truth: str = ""
    extra_info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RowFacts:
    """What the data room made of the training file."""

    count: int
    evaluation: int
    shape: str
    notices: list[str]
    samples: list[Sample]  # the first MEASURED_ROWS at most


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Lengths in tokens: prompts in their template, chosen answers with their end token."""

    prompts: list[int]
    answers: list[int]


def row_facts(cfg: RunConfig, tokenizer: Any) -> RowFacts:
    """Read and check the rows as a run will (converted rows are kept, so the run finds them). Raises UserError."""
    return facts_of(read(cfg, tokenizer))


def read(cfg: RunConfig, tokenizer: Any) -> Found:
    """The rows in the form that the method learns from. Raises UserError."""
    if cfg.rl.rl_type not in PREFERENCE_TYPES:
        return data.prepare(cfg, tokenizer)
    prepare: Callable[..., Found] = data.prepare_labelled if cfg.rl.rl_type == "kto" else data.prepare_pairs
    return prepare(cfg, tokenizer)


def facts_of(found: Found) -> RowFacts:
    """What the doctor wants to know of rows that have been read."""
    if isinstance(found, data.Prepared):
        count, evaluation, samples = found.num_train, found.num_eval, rollout_samples(found.train_path)
    else:
        count, evaluation = len(found.train), len(found.evaluation)
        samples = [sample_of(row) for row in found.train[:MEASURED_ROWS]]
    return RowFacts(count=count, evaluation=evaluation, shape=found.shape, notices=found.notices, samples=samples)


def sample_of(row: data.Pair | data.Labelled) -> Sample:
    """A row in memory."""
    place = f"{row.file}:{row.line}"
    if isinstance(row, data.Pair):
        return Sample(prompt=row.prompt, chosen=row.chosen, rejected=row.rejected, place=place)
    good, bad = (row.completion, None) if row.label else (None, row.completion)
    return Sample(prompt=row.prompt, chosen=good, rejected=bad, place=place)


def rollout_samples(path: Path) -> list[Sample]:
    """The first rows of a file in verl's format."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        batches = file.iter_batches(batch_size=MEASURED_ROWS)
        rows = [cells for batch in islice(batches, 1) for cells in batch.to_pylist()]
    return [verl_sample(cells) for cells in rows]


def verl_sample(cells: dict[str, Any]) -> Sample:
    """A row of verl's format; its answer is `chosen`, else the ground truth."""
    info = cells["extra_info"]
    truth = cells["reward_model"]["ground_truth"]
    return Sample(
        prompt=cells["prompt"],
        chosen=info["chosen"] or truth or None,
        rejected=info["rejected"],
        place=f"{info['file']}:{info['line']}",
        data_source=cells["data_source"],
        ground_truth=truth,
        extra_info=info,
    )


def measure(samples: Sequence[Sample], tokenizer: Any) -> Lengths:
    """Tokens of prompts and chosen answers."""
    texts = [sample.chosen for sample in samples if sample.chosen is not None]
    return Lengths(
        prompts=token_counts(tokenizer, [render(tokenizer, sample.prompt) for sample in samples]),
        answers=[number + 1 for number in token_counts(tokenizer, texts)],
    )


def judge_rows(facts: RowFacts) -> list[Finding]:
    """How many, and everything that was not taken as it stands."""
    evaluation = f", {facts.evaluation} for evaluation" if facts.evaluation else ""
    findings = [ok("data", f"{counted(facts.count, 'training row')} ({facts.shape}){evaluation}")]
    return findings + [note("data", notice) for notice in facts.notices]


def judge_lengths(lengths: Lengths, cfg: RunConfig) -> list[Finding]:
    """The histograms; what follows from them, settings.py says."""
    limits = [
        ("prompt length", lengths.prompts, "data.max_prompt_length", cfg.data.max_prompt_length),
        ("answer length", lengths.answers, "data.max_response_length", cfg.data.max_response_length),
    ]
    return [ok(check, f"{words(counts)}; {name} is {limit}") for check, counts, name, limit in limits if counts]


def words(counts: Sequence[int]) -> str:
    """12 to 88 tokens, half up to 30, 99% up to 80 (1-16: 3, 17-32: 40, ...)."""
    bins = ", ".join(f"{low}-{high}: {number}" for low, high, number in histogram(counts))
    half, most = share(counts, 0.5), share(counts, 0.99)
    return f"{min(counts)} to {max(counts)} tokens, half up to {half}, 99% up to {most} ({bins})"


def share(counts: Sequence[int], part: float) -> int:
    """The smallest length that at least this share of the rows does not exceed."""
    ordered = sorted(counts)
    return ordered[max(-(-int(part * 1000) * len(ordered) // 1000), 1) - 1]


def histogram(counts: Sequence[int]) -> list[tuple[int, int, int]]:
    """(from, to, rows) in at most BINS equal steps of a round width, from 1 to the largest; empty ends left out."""
    width = 1
    while width * BINS < max(counts):
        width *= 2
    numbers: dict[int, int] = {}
    for value in counts:
        numbers[(max(value, 1) - 1) // width] = numbers.get((max(value, 1) - 1) // width, 0) + 1
    return [(i * width + 1, (i + 1) * width, numbers.get(i, 0)) for i in range(min(numbers), max(numbers) + 1)]
