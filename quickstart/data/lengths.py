"""How long rows are in tokens, by the model's own tokenizer and chat template, and what is done about long ones.

Not here: loading the tokenizer.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

from quickstart.data.ledger import Ledger
from quickstart.data.rows import Message, Row, RowFault, shown
from quickstart.errors import Fault, UserError

CHUNK = 1000  # rows that are tokenized at a time
TOLERATED = 0.01  # with overlong=stop, the share of rows that may be left out

Overlong = Literal["stop", "drop", "truncate"]


def check_template(tokenizer: Any, name: str) -> None:
    """The tokenizer must have a chat template. name: the model, for the message."""
    if not tokenizer.chat_template:
        raise UserError(
            Fault(
                field="model.chat_template",
                found=f"no chat template in the tokenizer of {name}",
                rule="prompts are conversations and must be written in the model's template",
                fix="set model.chat_template=chatml, or use the instruct version of the model",
            )
        )


@dataclass(kw_only=True)
class Limit:
    """One limit, and what was met while it was held."""

    what: str  # prompt or answer
    setting: str
    tokens: int
    longest: int = 0
    too_long: int = 0  # rows

    def exceeded(self, lengths: list[int]) -> bool:
        """Whether a row with these lengths is too long; it is counted."""
        longest = max(lengths, default=0)
        self.longest = max(self.longest, longest)
        self.too_long += longest > self.tokens
        return longest > self.tokens

    @property
    def reason(self) -> str:
        """As it stands in the account of rows left out."""
        return f"{self.what} longer than {self.setting}={self.tokens} tokens"


@dataclass(kw_only=True)
class LengthGate:
    """Lets through what is short enough.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        max_prompt: longest prompt in tokens, the template's own included.
        max_answer: longest given answer in tokens, its end mark included; None: not measured.
        overlong: see DataArguments.overlong. With "truncate" prompts are cut here; answers go through whole, and the
            trainer cuts them at max_answer tokens, for it must not put an end mark after a cut.
    """

    tokenizer: Any
    max_prompt: int
    max_answer: int | None
    overlong: Overlong
    measured: int = field(default=0, init=False)  # rows

    def __post_init__(self) -> None:
        self.prompt = Limit(what="prompt", setting="data.max_prompt_length", tokens=self.max_prompt)
        self.answer = Limit(what="answer", setting="data.max_response_length", tokens=self.max_answer or 0)

    def pass_through(self, rows: Iterable[Row], ledger: Ledger) -> Iterator[Row]:
        """The rows that fit, in their order, measured CHUNK at a time."""
        rows = iter(rows)
        while chunk := list(islice(rows, CHUNK)):
            with _all_threads():
                prompts = self._prompt_lengths(chunk, ledger)
                answers = self._answer_lengths(chunk)
            for row, prompt, answer in zip(chunk, prompts, answers, strict=True):
                if prompt is not None:
                    yield from self._judge(row, prompt, answer, ledger)

    def _judge(self, row: Row, prompt: int, answers: list[int], ledger: Ledger) -> Iterator[Row]:
        self.measured += 1
        if self.max_answer is not None and self.answer.exceeded(answers):
            if self.overlong != "truncate":
                ledger.drop(self.answer.reason, row.file, row.line)
                return
            ledger.remark(f"answers that training cuts to {self.max_answer} tokens", row.file, row.line)
        if self.prompt.exceeded([prompt]):
            cut = (
                truncate(self.tokenizer, row.prompt_messages, self.max_prompt) if self.overlong == "truncate" else None
            )
            if cut is None:
                ledger.drop(self.prompt.reason, row.file, row.line)
                return
            ledger.remark(f"prompts cut from the left to {self.max_prompt} tokens", row.file, row.line)
            row = replace(row, prompt_messages=cut)
        yield row

    def _prompt_lengths(self, rows: list[Row], ledger: Ledger) -> list[int | None]:
        """Tokens of each prompt; None, with a fault in the ledger, where the template refuses the row."""
        rendered = [self._render(row, ledger) for row in rows]
        counts = iter(token_counts(self.tokenizer, [text for text in rendered if text is not None]))
        return [None if text is None else next(counts) for text in rendered]

    def _render(self, row: Row, ledger: Ledger) -> str | None:
        import jinja2

        try:
            return render(self.tokenizer, row.prompt_messages)
        except jinja2.TemplateError as error:
            roles = ", ".join(message["role"] for message in row.prompt_messages)
            rule = f"the model's chat template refuses the conversation: {shown(str(error), 120)}"
            fix = "bring the roles into the order that the template wants, or leave the row out"
            ledger.fault(RowFault(found=f"roles {roles}", rule=rule, fix=fix), row.file, row.line)
            return None

    def _answer_lengths(self, rows: list[Row]) -> list[list[int]]:
        """Tokens of the answers of each row, with the end mark."""
        if self.max_answer is None:
            return [[] for _ in rows]
        texts = [[text for text in (row.chosen, row.rejected, row.answer) if text is not None] for row in rows]
        counts = iter(token_counts(self.tokenizer, [text for row in texts for text in row]))
        return [[next(counts) + 1 for _ in row] for row in texts]

    def faults(self, files: str) -> list[Fault]:
        """With overlong=stop: what exceeds a limit in more than 1 % of the rows."""
        if self.overlong != "stop":
            return []
        limits = [limit for limit in (self.prompt, self.answer) if limit.too_long > TOLERATED * self.measured]
        return [
            Fault(
                field=limit.setting,
                found=f"{limit.tokens}, and {limit.too_long} of {self.measured} {limit.what}s in {files} exceed it; "
                f"the longest has {limit.longest} tokens",
                rule="data.overlong=stop leaves out up to 1% of the rows and refuses more",
                fix=f"set {limit.setting}={limit.longest} or more, or data.overlong=drop or truncate",
            )
            for limit in limits
        ]


@contextmanager
def _all_threads() -> Iterator[None]:
    """Let the tokenizer library use its threads for a batch, whatever the run says (it says no, for forks)."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "true"
    yield
    if before is None:
        del os.environ[name]
    else:
        os.environ[name] = before


def render(tokenizer: Any, messages: list[Message]) -> str:
    """The prompt as the model sees it, in its chat template, with the mark where its answer begins."""
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


def token_counts(tokenizer: Any, texts: list[str]) -> list[int]:
    """Tokens of each text, which has its special tokens already."""
    if not texts:
        return []
    if not tokenizer.is_fast:
        return [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    backend = tokenizer.backend_tokenizer  # without the lists that the wrapper makes of every token: a third faster
    backend.no_truncation()
    backend.no_padding()
    return [len(encoding) for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]


def truncate(tokenizer: Any, messages: list[Message], limit: int) -> list[Message] | None:
    """The conversation cut from the left to `limit` tokens: oldest turns first, then the start of the last question.

    System messages stay. None where the template and the system message alone fill the limit.
    """
    system = [message for message in messages if message["role"] == "system"]
    turns = [message for message in messages if message["role"] != "system"]

    def excess(rest: list[Message]) -> int:
        return token_counts(tokenizer, [render(tokenizer, system + rest)])[0] - limit

    while len(turns) > 1 and excess(turns) > 0:
        turns = turns[1:]
        while len(turns) > 1 and turns[0]["role"] != "user":
            turns = turns[1:]
    content = turns[0]["content"]
    while (over := excess([{**turns[0], "content": content}, *turns[1:]])) > 0:
        starts = token_starts(tokenizer, content)
        if over >= len(starts):
            return None
        content = content[max(starts[over], 1) :]
    return [*system, {**turns[0], "content": content}, *turns[1:]]


def token_starts(tokenizer: Any, text: str) -> list[int]:
    """Where each token begins, in characters. Without a fast tokenizer each character counts as one."""
    if not tokenizer.is_fast:
        return list(range(len(text)))
    return [
        start for start, _ in tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    ]
