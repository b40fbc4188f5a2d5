"""What a run asks of the data room: its training and evaluation rows, ready.

    prepared = prepare(cfg, tokenizer)              # ppo and its relatives: parquet in verl's row format
    pairs = prepare_pairs(cfg, tokenizer)           # dpo, simpo, orpo
    labelled = prepare_labelled(cfg, tokenizer)     # kto: pairs become two labelled answers

Not here: how (convert.py), and what the files look like (layouts.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from quickstart.arguments import PREFERENCE_TYPES, RunConfig
from quickstart.data import cache
from quickstart.data.convert import Conversion, WrittenPurpose
from quickstart.data.layouts import DEFAULT_SOURCE
from quickstart.data.lengths import check_template
from quickstart.data.reading import Reader
from quickstart.data.rows import Message
from quickstart.errors import Fault, UserError

CACHE_FOLDER = ".quickstart_cache"  # beside the outputs

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Rows for rollouts."""

    train_path: Path  # parquet, verl's row format
    eval_path: Path | None
    num_train: int
    num_eval: int
    shape: str  # how the training file was understood
    notices: list[str]  # what was left out and why, what was understood in another way than written
    sha256: str  # of the training data as it lies on disk, hexadecimal; for one file what sha256sum prints
    data_sources: dict[str, int]  # data_source -> training rows; DEFAULT_SOURCE where rows name none
    longest_prompt: int  # of the training rows, in tokens, template included
    cache_dir: Path  # probed for writing; the datasets library can be pointed here too


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One preference."""

    prompt: list[Message]
    chosen: str
    rejected: str
    file: str
    line: int


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """One answer and whether it is a good one."""

    prompt: list[Message]
    completion: str
    label: bool
    file: str
    line: int


@dataclass(frozen=True, kw_only=True)
class Examples(Generic[T]):
    """Rows for training without rollouts, in memory."""

    train: list[T]
    evaluation: list[T]
    shape: str
    notices: list[str]
    sha256: str
    longest_prompt: int


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """Both files of a run, converted."""

    train: cache.Entry
    evaluation: cache.Entry | None
    sha256: str
    folder: Path

    @property
    def notices(self) -> list[str]:
        return self.train.account.notices + (self.evaluation.account.notices if self.evaluation else [])


def prepare(cfg: RunConfig, tokenizer: Any) -> Prepared:
    """Read, check, measure and write the rows of a run with rollouts.

    Args:
        cfg: the settings; `data`, `rl.reward` and `training.output_dir` are read.
        tokenizer: the policy's, with a chat template.

    Raises:
        UserError: all faults of the training and evaluation files at once.
    """
    parts = _convert(cfg, tokenizer, "rollouts")
    train, evaluation = parts.train.account, parts.evaluation
    return Prepared(
        train_path=parts.train.rows_path,
        eval_path=evaluation.rows_path if evaluation else None,
        num_train=train.rows_written,
        num_eval=evaluation.account.rows_written if evaluation else 0,
        shape=train.shape,
        notices=parts.notices,
        sha256=parts.sha256,
        data_sources={name or DEFAULT_SOURCE: count for name, count in train.data_sources.items()},
        longest_prompt=train.longest_prompt,
        cache_dir=parts.folder,
    )


def prepare_pairs(cfg: RunConfig, tokenizer: Any) -> Examples[Pair]:
    """The same for preference pairs. Answers over max_response_length follow data.overlong too; see LengthGate."""
    return _examples(_convert(cfg, tokenizer, "pairs"), lambda cells: Pair(**cells))


def prepare_labelled(cfg: RunConfig, tokenizer: Any) -> Examples[Labelled]:
    """The same for labelled answers; a pair becomes a good and a bad one."""
    return _examples(_convert(cfg, tokenizer, "labelled"), lambda cells: Labelled(**cells))


@dataclass(frozen=True, kw_only=True)
class Look:
    """What can be said of a run's rows without its tokenizer."""

    count: int  # training rows; of kto labelled answers
    notices: list[str]


def look_at_rows(cfg: RunConfig) -> Look:
    """Read and check both files; lengths are not looked at, nothing is written. Raises UserError."""
    purpose: WrittenPurpose = "rollouts"
    if cfg.rl.rl_type in PREFERENCE_TYPES:
        purpose = "labelled" if cfg.rl.rl_type == "kto" else "pairs"
    faults: list[Fault] = []
    counts: list[int] = []
    notices: list[str] = []
    for setting, files in files_of(cfg):
        needs_answer = cfg.rl.reward == "preference"
        reader = Reader(args=cfg.data, setting=setting, purpose=purpose, needs_answer=needs_answer)
        try:
            sources = reader.sources(files)
            sizes = [2 if purpose == "labelled" and row.label is None else 1 for row in reader.rows(sources)]
            reader.finish(len(sizes), sources)
        except UserError as error:  # gathered, so that one message has both files' faults
            faults.extend(error.faults)
            continue
        counts.append(sum(sizes))
        notices += reader.ledger.notices()
    if faults:
        raise UserError(faults)
    return Look(count=counts[0], notices=notices)


def files_of(cfg: RunConfig) -> list[tuple[str, str | list[str]]]:
    """(setting, files) for training and, where there are any, evaluation."""
    settings = (("data.train_file", cfg.data.train_file), ("data.eval_file", cfg.data.eval_file))
    return [(setting, files) for setting, files in settings if files is not None]


def cache_folder(cfg: RunConfig) -> Path:
    """Where converted data is kept: data.cache_dir, or beside the outputs."""
    if cfg.data.cache_dir is not None:
        return Path(cfg.data.cache_dir).expanduser().absolute()
    return Path(cfg.training.output_dir).expanduser().absolute().parent / CACHE_FOLDER


def _convert(cfg: RunConfig, tokenizer: Any, purpose: WrittenPurpose) -> _Parts:
    check_template(tokenizer, cfg.model.model_name_or_path)
    folder = cache_folder(cfg)
    is_new = not folder.exists()
    cache.writable_folder(folder, "data.cache_dir")
    faults: list[Fault] = []
    done: dict[str, tuple[cache.Entry, str]] = {}
    for setting, files in files_of(cfg):
        conversion = Conversion(
            args=cfg.data,
            setting=setting,
            files=files,
            purpose=purpose,
            needs_answer=cfg.rl.reward == "preference",
            tokenizer=tokenizer,
        )
        try:
            done[setting] = conversion.run(folder)
        except UserError as error:  # gathered, so that one message has both files' faults
            faults.extend(error.faults)
    if faults:
        if is_new:
            folder.rmdir()  # a refused run leaves nothing behind
        raise UserError(faults)
    train, digest = done["data.train_file"]
    evaluation = done["data.eval_file"][0] if "data.eval_file" in done else None
    return _Parts(train=train, evaluation=evaluation, sha256=digest, folder=folder)


def _examples(parts: _Parts, make: Callable[[dict[str, Any]], T]) -> Examples[T]:
    import pyarrow.parquet as pq

    def rows(entry: cache.Entry | None) -> list[T]:
        if entry is None:
            return []
        with pq.ParquetFile(entry.rows_path) as file:
            return [make(cells) for batch in file.iter_batches(batch_size=1000) for cells in batch.to_pylist()]

    return Examples(
        train=rows(parts.train),
        evaluation=rows(parts.evaluation),
        shape=parts.train.account.shape,
        notices=parts.notices,
        sha256=parts.sha256,
        longest_prompt=parts.train.account.longest_prompt,
    )
