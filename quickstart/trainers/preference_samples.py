"""A few answers before training and after it, with the run's reward: what a person looks at to see what changed.

Greedy, so that a difference is the training's and not the dice's. Prompts of the evaluation rows where there are any.
Not here: how tokens are generated (plugin/engine.py), what a reward is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from quickstart.plugin.engine import Completion, Generator, Sampling
from quickstart.plugin.graph_engine import GraphGenerator, can_replay
from quickstart.plugin.rollout import stop_token_ids
from quickstart.plugin.training import Policy
from quickstart.record.console import printable, reward_text, text_table
from quickstart.trainers.preference_batches import LabelledRow, PairRow

COUNT = 8  # prompts
TABLE_ROWS = 4  # of these in the table on the console
Reward = Callable[..., Any]  # verl's: (data_source, solution_str, ground_truth, extra_info) -> number or dict


@dataclass(kw_only=True)
class Question:
    """A prompt with what is known about good and bad answers to it."""

    messages: list[dict[str, str]]
    info: dict[str, Any] = field(default_factory=dict)  # extra_info of the reward: chosen, rejected, file, line

    @property
    def text(self) -> Any:
        """As rollouts show it: the text of a single message, else the messages."""
        return self.messages[-1]["content"] if len(self.messages) == 1 else self.messages


def questions_of(rows: Sequence[PairRow | LabelledRow], count: int = COUNT) -> list[Question]:
    """The first different prompts; labelled answers to one prompt are put together."""
    found: dict[str, Question] = {}
    for row in rows:
        key = repr(row.prompt)
        if key not in found and len(found) == count:
            continue
        question = found.setdefault(key, Question(messages=row.prompt, info={"file": row.file, "line": row.line}))
        for name, answer in known_answers(row).items():
            question.info.setdefault(name, answer)
    return list(found.values())


def known_answers(row: Any) -> dict[str, str]:
    """What a row says about its prompt, as the rewards read it: chosen, rejected."""
    if "label" in type(row).__dataclass_fields__:
        return {"chosen" if row.label else "rejected": row.completion}
    return {"chosen": row.chosen, "rejected": row.rejected}


class Sampler:
    """Answers some questions with the policy as it is.

    Args:
        policy: on one device; its own module generates, no copy is made.
        tokenizer: the policy's.
        questions: what is asked.
        reward: scores the answers; None: no reward is shown.
        limit: longest answer, in tokens.
        max_prompt: longer prompts are cut from the left, as in training.
        autocast: precision of the computation.
    """

    def __init__(
        self,
        policy: Policy,
        tokenizer: Any,
        questions: Sequence[Question],
        reward: Reward,
        *,
        limit: int,
        max_prompt: int,
        autocast: torch.dtype,
    ) -> None:
        self._policy, self._tokenizer, self._questions, self._reward = policy, tokenizer, questions, reward
        texts = [
            tokenizer.apply_chat_template(q.messages, add_generation_prompt=True, tokenize=False) for q in questions
        ]
        ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
        positions = policy.model_config.hf_config.max_position_embeddings
        self._prompts = [prompt[-min(max_prompt, positions - 1) :] for prompt in ids]
        self._limits = [min(limit, positions - len(prompt)) for prompt in self._prompts]
        self._autocast = autocast
        self.first: list[dict[str, Any]] = []

    def rows(self, step: int) -> list[dict[str, Any]]:
        """Rollout rows under the weights of now. step: the one that comes next, so that 1 is before training."""
        completions = self._generate()
        rows = [self._row(step, i, answer) for i, answer in enumerate(completions)]
        self.first = self.first or rows
        return rows

    def _generate(self) -> list[Completion]:
        module = self._policy.module
        graphs = can_replay(module)  # an eager model takes 40 ms a token and seconds to load each length's kernels
        generator = (GraphGenerator if graphs else Generator)(
            module,
            stop_token_ids=stop_token_ids(self._tokenizer, self._policy.model_config.generation_config),
            pad_token_id=self._policy.model_config.tokenizer.pad_token_id,
            seed=0,
        )
        sampling = [Sampling(temperature=0, max_new_tokens=limit) for limit in self._limits]
        was_training = module.training
        module.eval()
        enabled = self._autocast != torch.float32
        # a graph must make its casts itself: those in autocast's cache are gone after the block
        with torch.autocast(module_device(module), self._autocast, enabled=enabled, cache_enabled=not graphs):
            answers = generator.generate(self._prompts, sampling)
        module.train(was_training)
        return answers

    def _row(self, step: int, index: int, answer: Completion) -> dict[str, Any]:
        question = self._questions[index]
        text = self._tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        truth = question.info.get("chosen", "")
        score = self._reward(
            data_source="quickstart", solution_str=text, ground_truth=truth, extra_info=dict(question.info)
        )
        return {
            "prompt": question.text,
            "response": text,
            "reward": float(score["score"] if isinstance(score, dict) else score),
            "step": step - 1,  # updates that the weights have seen
            "uid": str(index),
            "ground_truth": truth,
            "prompt_length": len(self._prompts[index]),
            "response_length": len(answer.token_ids),
            "finish_reason": answer.finish_reason,
        }


def module_device(module: torch.nn.Module) -> str:
    """cpu or cuda."""
    return next(module.parameters()).device.type


def before_after(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> str:
    """Both answers to the same prompts side by side, as text."""
    columns = (("prompt", 2), ("before", 3), ("after", 3), ("reward", 0))
    pairs = list(zip(before, after, strict=True))[:TABLE_ROWS]
    cells = [
        (
            printable(old["prompt"]),
            printable(old["response"]),
            printable(new["response"]),
            f"{reward_text(old['reward'])} -> {reward_text(new['reward'])}",
        )
        for old, new in pairs
    ]
    return text_table(columns, cells)
