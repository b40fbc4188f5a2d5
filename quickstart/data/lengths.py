"""How long prompts are in tokens, by the model's own tokenizer and chat template, and what is done about long ones.

Not here: loading the tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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


@dataclass
class LengthGate:
    """Lets through what is short enough.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        limit: longest prompt in tokens, the template's own included.
        overlong: see DataArguments.overlong.
    """

    tokenizer: Any
    limit: int
    overlong: Overlong
    longest: int = field(default=0, init=False)  # of all prompts, in tokens
    too_long: int = field(default=0, init=False)
    measured: int = field(default=0, init=False)

    @property
    def reason(self) -> str:
        """As it stands in the account of dropped rows."""
        return f"prompt longer than data.max_prompt_length={self.limit} tokens"

    def pass_through(self, rows: Iterable[Row], ledger: Ledger) -> Iterator[Row]:
        """The rows that fit, in their order, measured CHUNK at a time."""
        rows = iter(rows)
        while chunk := list(islice(rows, CHUNK)):
            for row, length in zip(chunk, self._lengths(chunk, ledger), strict=True):
                if length is None:
                    continue
                self.measured += 1
                self.longest = max(self.longest, length)
                if length <= self.limit:
                    yield row
                else:
                    yield from self._long(row, length, ledger)

    def _long(self, row: Row, length: int, ledger: Ledger) -> Iterator[Row]:
        self.too_long += 1
        shorter = truncate(self.tokenizer, row.prompt_messages, self.limit) if self.overlong == "truncate" else None
        if shorter is None:
            ledger.drop(self.reason, row.file, row.line)
            return
        ledger.remark(f"prompts cut from the left to {self.limit} tokens", row.file, row.line)
        yield replace(row, prompt_messages=shorter)

    def _lengths(self, rows: list[Row], ledger: Ledger) -> list[int | None]:
        """Tokens of each prompt; None, with a fault in the ledger, where the template refuses the row."""
        rendered = [self._render(row, ledger) for row in rows]
        texts = [text for text in rendered if text is not None]
        counts = iter(token_counts(self.tokenizer, texts))
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

    def raise_if_many(self, files: str) -> None:
        """With overlong=stop: refuse when more than 1 % of the rows would be left out."""
        if self.overlong != "stop" or self.too_long <= TOLERATED * self.measured:
            return
        raise UserError(
            Fault(
                field="data.max_prompt_length",
                found=f"{self.limit}, and {self.too_long} of {self.measured} prompts in {files} exceed it; "
                f"the longest has {self.longest} tokens",
                rule="data.overlong=stop leaves out up to 1% of the rows and refuses more",
                fix=f"set data.max_prompt_length>={self.longest}, or data.overlong=drop or truncate",
            )
        )


def render(tokenizer: Any, messages: list[Message]) -> str:
    """The prompt as the model sees it, in its chat template, with the mark where its answer begins."""
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


def token_counts(tokenizer: Any, texts: list[str]) -> list[int]:
    """Tokens of each text, which has its special tokens already."""
    if not texts:
        return []
    return [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


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
        offsets = tokenizer(content, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        if over >= len(offsets):
            return None
        content = content[max(offsets[over][0], 1) :]
    return [*system, {**turns[0], "content": content}, *turns[1:]]
