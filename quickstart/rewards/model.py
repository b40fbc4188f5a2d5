"""A reward model: the score that a sequence-classification model with one output gives to prompt and answer.

Models exchange text (design D7): the conversation is written in the reward model's own chat template, whatever the
policy's is. Answers that arrive together are scored together. The number is the model's own, unbounded.
Not here: whether the folder holds such a model (model_check.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from quickstart.errors import Fault, RunError
from quickstart.rewards.model_check import check_reward_model, refused

BATCH_ANSWERS = 16  # scored in one forward pass
GATHER_SECONDS = 0.005  # how long an answer waits for others that arrive with it

Message = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """What is needed to load a reward model, also in another process: plain values."""

    path: str  # a local folder
    dtype: str = "float32"
    device: str = "cpu"
    offload: bool = False  # the weights rest in host memory between two batches
    use_flash_attention_2: bool = False
    trust_remote_code: bool = False


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """One answer that waits for its score."""

    text: str  # the whole conversation in the reward model's template
    place: str  # file:line of the row
    score: asyncio.Future[float]


@dataclass(kw_only=True)
class ModelReward:
    """Scores answers. The folder is checked when this is made; the weights are loaded by `load`, or when needed."""

    settings: ModelSettings
    tokenizer: Any = field(init=False, repr=False)
    _model: Any = field(default=None, init=False, repr=False)
    _waiting: list[_Answer] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        self.tokenizer = check_reward_model(self.settings.path, self.settings.trust_remote_code)

    def load(self) -> None:
        """Load the weights. Raises UserError where the checkpoint does not fill the model."""
        if self._model is None:
            self._model = _load(self.settings)

    def render(self, conversation: list[Message]) -> str:
        """The conversation, answer included, as the reward model sees it."""
        return self.tokenizer.apply_chat_template(conversation, tokenize=False)

    async def compute_score(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], **_: Any
    ) -> float:
        """verl's call for one answer; it waits a moment, to be scored together with those that arrive with it."""
        text = self.render([*extra_info["prompt"], {"role": "assistant", "content": solution_str}])
        place = f"{extra_info.get('file', '?')}:{extra_info.get('line', '?')}"
        answer = _Answer(text=text, place=place, score=asyncio.get_running_loop().create_future())
        self._waiting.append(answer)
        if len(self._waiting) == 1:
            await self._score_the_waiting()
        return await answer.score

    async def _score_the_waiting(self) -> None:
        seen = 0
        while seen < len(self._waiting):  # as long as more arrive
            seen = len(self._waiting)
            await asyncio.sleep(GATHER_SECONDS)
        batch, self._waiting = self._waiting, []
        try:
            scores = self.scores([answer.text for answer in batch], [answer.place for answer in batch])
        except Exception as error:  # everybody who waits must hear of it
            for answer in batch:
                answer.score.set_exception(error)
            return
        for answer, score in zip(batch, scores, strict=True):
            answer.score.set_result(score)

    def scores(self, texts: list[str], places: list[str] | None = None) -> list[float]:
        """One score for each rendered conversation.

        Args:
            places: where they come from, for messages.

        Raises:
            RunError: a conversation is longer than the model can read.
        """
        import torch

        self.load()
        rows = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        self._check_rows(rows, places or ["?"] * len(rows))
        order = sorted(
            range(len(rows)), key=lambda index: len(rows[index])
        )  # neighbours of a like length: little padding
        scores = [0.0] * len(rows)
        with torch.inference_mode(), self._on_device():
            for chunk in _chunks(order):
                for index, score in zip(chunk, self._forward([rows[index] for index in chunk]), strict=True):
                    scores[index] = score
        return scores

    def _check_rows(self, rows: list[list[int]], places: list[str]) -> None:
        limit = self._model.config.get_text_config().max_position_embeddings
        known = self._model.get_input_embeddings().weight.shape[0]
        for row, place in zip(rows, places, strict=True):
            if limit is not None and len(row) > limit:
                found = f"a conversation of {len(row)} tokens in its tokenizer"
                fix = "lower data.max_prompt_length and data.max_response_length, or use another reward model"
                raise RunError(Fault(field=place, found=found, rule=f"the reward model reads at most {limit}", fix=fix))
            if max(row, default=0) >= known:  # on a GPU this would end the process without a word
                found, rule = f"token id {max(row)}", f"the reward model knows ids below {known}"
                fix = "copy the tokenizer files of the reward model into its folder"
                raise RunError(Fault(field=place, found=found, rule=rule, fix=fix))

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        self._model.to(self.settings.device)
        yield
        if self.settings.offload:
            self._model.to("cpu")

    def _forward(self, rows: list[list[int]]) -> list[float]:
        """Scores of some rows of token ids: one pass, padded on the right.

        The model finds a row's last token by its padding id (transformers modeling_layers.py:145). A checkpoint that
        names one keeps it, so that a batch gives what its rows give alone; one without gets an id that no row has.
        """
        import torch

        config = self._model.config.get_text_config()
        own_pad, pad = config.pad_token_id, config.pad_token_id
        if pad is None:
            present = {token for row in rows for token in row}
            pad = next(token for token in range(len(present) + 1) if token not in present)
        longest = max(map(len, rows))
        device = self.settings.device
        ids = torch.tensor([row + [pad] * (longest - len(row)) for row in rows], device=device)
        lengths = torch.tensor([[len(row)] for row in rows], device=device)
        mask = (torch.arange(longest, device=device) < lengths).long()
        config.pad_token_id = pad
        logits = self._model(input_ids=ids, attention_mask=mask).logits
        config.pad_token_id = own_pad
        return logits[:, 0].float().tolist()


def _chunks(order: list[int]) -> Iterator[list[int]]:
    for start in range(0, len(order), BATCH_ANSWERS):
        yield order[start : start + BATCH_ANSWERS]


def _load(settings: ModelSettings) -> Any:
    """The model with its weights, in evaluation mode, in host memory."""
    import torch
    from transformers import AutoModelForSequenceClassification

    model, info = AutoModelForSequenceClassification.from_pretrained(
        settings.path,
        num_labels=1,
        dtype=getattr(torch, settings.dtype),
        attn_implementation="flash_attention_2" if settings.use_flash_attention_2 else "sdpa",
        trust_remote_code=settings.trust_remote_code,
        output_loading_info=True,
    )
    missing = sorted(info["missing_keys"])
    if missing:
        rule = f"{len(missing)} weights are not in the checkpoint and would be random, first {missing[0]}"
        raise refused(settings.path, rule, "copy config.json and weights from the same model")
    return model.eval()
