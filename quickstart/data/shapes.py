"""What the columns of a file mean: the shapes of preference, instruction and chat data that people have.

A shape is recognised once per file by its column names; every row must then fit it. `data.columns` renames columns
before that. Not here: reading files, judging a row's texts (check.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from quickstart.data.messages import HH_MARK, Remark, hh_turns, to_answer, to_messages
from quickstart.data.rows import Message, RowDrop, RowFault, shown
from quickstart.errors import Fault

Parsed = dict[str, Any]  # fields of a Row but file, line, extra; "extra" where the shape fills it itself
Rec = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One way to write a row."""

    name: str  # as printed
    needs: tuple[str, ...]  # columns that make a file this shape
    uses: tuple[str, ...] = ()  # further columns that it reads
    parse: Callable[[Rec, Remark], Parsed]

    @property
    def columns(self) -> frozenset[str]:
        """Every column that it reads; the rest is passed on as `extra`."""
        return frozenset(self.needs + self.uses)


def text_of(rec: Rec, column: str) -> str:
    """A column that must be text."""
    value = rec.get(column)
    if not isinstance(value, str):
        raise RowFault(found=f"{column} {shown(value)}", rule=f"{column} must be text", fix="write a string in quotes")
    return value


def text_or_none(value: Any) -> str | None:
    """Text as it is; anything else is not taken."""
    return value if isinstance(value, str) else None


def with_system(rec: Rec, messages: list[Message]) -> list[Message]:
    """The messages, led by the text of the column `system` where there is one."""
    if not rec.get("system"):
        return messages
    return [{"role": "system", "content": text_of(rec, "system")}, *messages]


def split_answer(messages: list[Message], column: str) -> tuple[list[Message], str | None]:
    """A dialogue as prompt and last answer; no answer where a user has the last word."""
    if not messages:
        raise RowFault(found=f"{column} []", rule=f"{column} must hold messages", fix="write at least one user message")
    if messages[-1]["role"] == "assistant":
        return messages[:-1], messages[-1]["content"]
    return messages, None


def split_pair(chosen: list[Message], rejected: list[Message]) -> Parsed:
    """Two dialogues that share all but the last answer."""
    prompt, good = split_answer(chosen, "chosen")
    other, bad = split_answer(rejected, "rejected")
    if good is None or bad is None:
        raise RowDrop("a dialogue ends without an answer")
    if prompt != other:
        raise RowDrop("chosen and rejected differ before the last answer")
    return {"prompt_messages": prompt, "chosen": good, "rejected": bad}


def parse_triple(rec: Rec, remark: Remark) -> Parsed:
    prompt = to_messages(rec.get("prompt"), "prompt", remark)
    chosen, rejected = rec.get("chosen"), rec.get("rejected")
    if isinstance(chosen, list) and isinstance(rejected, list) and len(chosen) > len(prompt) + 1:
        pair = split_pair(to_messages(chosen, "chosen", remark), to_messages(rejected, "rejected", remark))
        shared = pair["prompt_messages"]
        if prompt in (shared[: len(prompt)], shared[-len(prompt) :]):
            return pair  # the prompt column holds one turn of a longer dialogue
    return {
        "prompt_messages": with_system(rec, prompt),
        "chosen": to_answer(chosen, prompt, "chosen", remark),
        "rejected": to_answer(rejected, prompt, "rejected", remark),
    }


def parse_dialogues(rec: Rec, remark: Remark) -> Parsed:
    sides = {}
    for column in ("chosen", "rejected"):
        value = rec.get(column)
        if isinstance(value, str) and not HH_MARK.match(value):
            rule = f"without a prompt column, {column} must be a whole dialogue"
            fix = 'name the prompt column (data.columns.prompt=...), or begin with "\\n\\nHuman: "'
            raise RowFault(found=f"{column} {shown(value)}", rule=rule, fix=fix)
        sides[column] = hh_turns(value) if isinstance(value, str) else to_messages(value, column, remark)
    return split_pair(sides["chosen"], sides["rejected"])


def parse_labelled(rec: Rec, remark: Remark) -> Parsed:
    return parse_completion(rec, remark) | {"label": to_label(rec.get("label"), remark)}


def parse_completion(rec: Rec, remark: Remark) -> Parsed:
    prompt = to_messages(rec.get("prompt"), "prompt", remark)
    answer = to_answer(rec.get("completion"), prompt, "completion", remark)
    return {"prompt_messages": with_system(rec, prompt), "answer": answer}


def to_label(value: Any, remark: Remark) -> bool:
    """True or false, strictly: `"false"` is false, `"maybe"` is a fault."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        word = value.strip().lower()
        if word in ("true", "false", "1", "0"):
            remark("label: text read as true or false")
            return word in ("true", "1")
    elif value in (0, 1):
        return bool(value)
    raise RowFault(found=f"label {shown(value)}", rule="label must be true or false (or 1, 0)", fix="correct the label")


def parse_pku(rec: Rec, remark: Remark) -> Parsed:
    column = "better_response_id" if "better_response_id" in rec else "safer_response_id"
    if column == "better_response_id" and "safer_response_id" in rec:
        remark("better_response_id decides; data.columns.better_response_id=safer_response_id takes the safer answer")
    better = {"0": 0, "1": 1, "False": 0, "True": 1}.get(str(rec.get(column)).strip())
    if better is None:
        found = f"{column} {shown(rec.get(column))}"
        raise RowFault(found=found, rule=f"{column} must be 0 or 1", fix="correct the id, or remove the row")
    return {
        "prompt_messages": to_messages(rec.get("prompt"), "prompt", remark),
        "chosen": text_of(rec, f"response_{better}"),
        "rejected": text_of(rec, f"response_{1 - better}"),
    }


def parse_conversation(column: str) -> Callable[[Rec, Remark], Parsed]:
    def parse(rec: Rec, remark: Remark) -> Parsed:
        value = rec.get(column)
        if not isinstance(value, list):
            rule = f"{column} must be a list of messages"
            fix = 'write [{"role": "user", "content": "..."}]'
            raise RowFault(found=f"{column} {shown(value)}", rule=rule, fix=fix)
        messages = with_system(rec, to_messages(value, column, remark))
        if "chosen" in rec or "rejected" in rec:
            return {
                "prompt_messages": messages,
                "chosen": to_answer(rec.get("chosen"), messages, "chosen", remark),
                "rejected": to_answer(rec.get("rejected"), messages, "rejected", remark),
            }
        prompt, answer = split_answer(messages, column)
        return {"prompt_messages": prompt, "answer": answer}

    return parse


def parse_alpaca(rec: Rec, remark: Remark) -> Parsed:
    instruction, more = text_of(rec, "instruction"), rec.get("input")
    if more:
        instruction = f"{instruction}\n\n{text_of(rec, 'input')}"
    turns: list[Message] = []
    for pair in rec.get("history") or []:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair)):
            raise RowFault(
                found=f"history {shown(pair)}", rule="history must be pairs of texts", fix="write [[question, answer]]"
            )
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    prompt = with_system(rec, [*turns, {"role": "user", "content": instruction}])
    answers = {name: to_answer(rec[name], prompt, name, remark) for name in ("chosen", "rejected") if name in rec}
    output = rec.get("output")
    return {"prompt_messages": prompt, **answers, "answer": None if output is None else text_of(rec, "output")}


def parse_question(rec: Rec, remark: Remark) -> Parsed:
    question = {"role": "user", "content": text_of(rec, "question")}
    return {
        "prompt_messages": with_system(rec, [question]),
        "answer": to_ground_truth(rec.get("answer"), "answer", remark),
    }


def parse_prompt(rec: Rec, remark: Remark) -> Parsed:
    prompt = with_system(rec, to_messages(rec.get("prompt"), "prompt", remark))
    answer = to_ground_truth(rec.get("answer"), "answer", remark)
    return {
        "prompt_messages": prompt,
        "answer": answer,
        "chosen": to_answer(rec.get("chosen"), prompt, "chosen", remark),
    }


def to_ground_truth(value: Any, column: str, remark: Remark) -> str | None:
    """A reference answer as text; numbers are written out, since scorers compare text."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        remark(f"{column}: numbers taken as text")
        return str(value)
    return json.dumps(value, ensure_ascii=False, default=str)


def parse_verl(rec: Rec, remark: Remark) -> Parsed:
    """verl's own rows (verl/utils/dataset/rl_dataset.py); what they carry beside the prompt is kept as it is."""
    reward_model = rec.get("reward_model")
    extra_info = rec.get("extra_info") or {}
    if not isinstance(reward_model, dict) or not isinstance(extra_info, dict):
        found = f"reward_model {shown(reward_model)}, extra_info {shown(extra_info)}"
        raise RowFault(found=found, rule="both must be objects", fix='write {"style": "rule", "ground_truth": "..."}')
    truth = reward_model.get("ground_truth")
    extra = {key: value for key, value in extra_info.items() if value is not None}
    if not isinstance(truth, (str, int, float, type(None))):
        extra["ground_truth"] = truth  # search and code scorers read lists and objects
    return {
        "prompt_messages": to_messages(rec.get("prompt"), "prompt", remark),
        "answer": to_ground_truth(truth, "ground_truth", remark),
        "chosen": text_or_none(extra_info.get("chosen")),
        "rejected": text_or_none(extra_info.get("rejected")),
        "data_source": None if rec.get("data_source") is None else text_of(rec, "data_source"),
        "extra": extra,
    }


# The first that fits a file's columns is taken: the ones that need more stand before those that need less.
SHAPES: tuple[Shape, ...] = (
    Shape(
        name="verl rows",
        needs=("prompt", "reward_model"),
        uses=("data_source", "ability", "extra_info"),
        parse=parse_verl,
    ),
    Shape(
        name="PKU-SafeRLHF (response_0, response_1, better_response_id)",
        needs=("prompt", "response_0", "response_1", "better_response_id"),
        uses=("safer_response_id",),
        parse=parse_pku,
    ),
    Shape(
        name="PKU-SafeRLHF (response_0, response_1, safer_response_id)",
        needs=("prompt", "response_0", "response_1", "safer_response_id"),
        parse=parse_pku,
    ),
    Shape(
        name="UltraFeedback binarized (prompt, chosen, rejected with scores)",
        needs=("prompt", "chosen", "rejected", "score_chosen", "score_rejected"),
        uses=("messages", "system"),
        parse=parse_triple,
    ),
    Shape(
        name="prompt, chosen, rejected", needs=("prompt", "chosen", "rejected"), uses=("system",), parse=parse_triple
    ),
    Shape(
        name="Alpaca with chosen, rejected",
        needs=("instruction", "chosen", "rejected"),
        uses=("input", "output", "system", "history"),
        parse=parse_alpaca,
    ),
    Shape(
        name="ShareGPT with chosen, rejected",
        needs=("conversations", "chosen", "rejected"),
        uses=("system",),
        parse=parse_conversation("conversations"),
    ),
    Shape(
        name="chosen, rejected as whole dialogues (HH-RLHF)",
        needs=("chosen", "rejected"),
        parse=parse_dialogues,
    ),
    Shape(
        name="prompt, completion, label",
        needs=("prompt", "completion", "label"),
        uses=("system",),
        parse=parse_labelled,
    ),
    Shape(name="prompt, completion", needs=("prompt", "completion"), uses=("system",), parse=parse_completion),
    Shape(
        name="ShareGPT conversations",
        needs=("conversations",),
        uses=("system",),
        parse=parse_conversation("conversations"),
    ),
    Shape(name="messages", needs=("messages",), uses=("system",), parse=parse_conversation("messages")),
    Shape(
        name="Alpaca (instruction, input, output)",
        needs=("instruction",),
        uses=("input", "output", "system", "history"),
        parse=parse_alpaca,
    ),
    Shape(name="question, answer", needs=("question", "answer"), uses=("system",), parse=parse_question),
    Shape(name="prompt, answer", needs=("prompt", "answer"), uses=("system",), parse=parse_prompt),
    Shape(name="prompt, chosen", needs=("prompt", "chosen"), uses=("system",), parse=parse_prompt),
    Shape(name="prompt only", needs=("prompt",), uses=("system",), parse=parse_prompt),
)
OUR_COLUMNS = tuple(dict.fromkeys(name for shape in SHAPES for name in (*shape.needs, *shape.uses)))
# Other words for a column, for the suggestion only: nothing is renamed unasked.
SYNONYMS = {
    "prompt": ("question", "query", "instruction", "input", "text", "problem", "prompt_text", "user"),
    "answer": ("response", "output", "completion", "solution", "target", "reply", "reference"),
    "chosen": ("accepted", "good", "preferred", "better", "winner", "positive", "response_chosen"),
    "rejected": ("bad", "dispreferred", "worse", "loser", "negative", "response_rejected"),
}


def rename(rec: Rec, columns: Mapping[str, str]) -> Rec:
    """The record with the user's column names replaced by ours. columns: ours -> theirs."""
    if not columns:
        return rec
    taken = set(columns.values())
    kept = {key: value for key, value in rec.items() if key not in taken}
    return kept | {ours: rec[theirs] for ours, theirs in columns.items() if theirs in rec}


def recognise(columns: Collection[str]) -> Shape | None:
    """The first shape whose columns are all there (after renaming)."""
    return next((shape for shape in SHAPES if all(name in columns for name in shape.needs)), None)


def nearest_column(ours: str, columns: Collection[str]) -> str | None:
    """The column that was probably meant by one of our names: another case, a typo, another word."""
    folded = {name.casefold(): name for name in columns}
    if ours in folded:
        return folded[ours]
    close = get_close_matches(ours, folded, n=1, cutoff=0.75)
    if close:
        return folded[close[0]]
    return next((folded[word] for word in SYNONYMS.get(ours, ()) if word in folded), None)


def unknown_shape(file: str, columns: Collection[str]) -> Fault:
    """No shape fits: the columns that are there, and the nearest name."""
    guess = nearest_column("prompt", columns)
    fix = f"did you mean {guess}? set data.columns.prompt={guess}" if guess else "set data.columns.prompt=YOUR_COLUMN"
    return Fault(
        field=file,
        found=f"columns {', '.join(map(str, columns)) or 'none'}",
        rule="column `prompt` not found, and no other known shape (chosen and rejected dialogues, messages, "
        "conversations, instruction, question and answer)",
        fix=fix,
    )


def mapping_faults(columns: Mapping[str, str], present: Collection[str], file: str) -> list[Fault]:
    """data.columns must name our columns on the left and the file's on the right."""
    faults = []
    for ours, theirs in columns.items():
        if ours not in OUR_COLUMNS:
            close = get_close_matches(ours, OUR_COLUMNS, n=1)
            fix = f"did you mean {close[0]}?" if close else f"use one of {', '.join(OUR_COLUMNS)}"
            rule = "the left side of data.columns is one of our names"
            faults.append(Fault(field=f"data.columns.{ours}", found=ours, rule=rule, fix=fix))
        elif theirs not in present:
            near = nearest_column(theirs, present) or nearest_column(ours, present)
            fix = f"did you mean {near}?" if near else "name a column that is there"
            found = f"{theirs}; {file} has {', '.join(map(str, present))}"
            faults.append(Fault(field=f"data.columns.{ours}", found=found, rule="no such column", fix=fix))
    return faults
