"""Token generation with vLLM in this process: prompts in, tokens and their log-probs out. Knows nothing of verl.

The interface of :class:`quickstart.plugin.engine.Generator`, around `vllm.LLM`. vLLM's scheduler, paged cache and
graphs run in this process, so that weights reach its model from the device's memory, without a copy on the host. While
the trainer works it sleeps: weights and cache are dropped, since every update sends new weights.

Written for vLLM 0.24; the lines that each call rests on are named where it is made.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from quickstart.errors import Fault, RunError
from quickstart.plugin.engine import Completion, Sampling, seed_of

FIELD = "rl.rollout_engine"
INSTEAD = (
    "write rl.rollout_engine=hf, which needs no vllm, or pip install 'quickstart-rl[gpu]', whose vllm and torch fit "
    "each other"
)
# Read when vllm starts, and kept from then on (v1/engine/core.py, enable_envs_cache).
VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its core in this process: another one could not be handed our tensors
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # flashinfer may be missing, and gives no log-probs of what it samples from
    "VLLM_NO_USAGE_STATS": "1",  # it would report this machine to its authors
}
PAGE = 64  # tokens: the cache comes in blocks of 16, with some kernels of 32 or 64
SPARE = 1.1  # blocks beside those of the answers; where kinds of layers share blocks, some are padding


def load() -> Any:
    """Import vllm, with its variables set.

    Raises:
        RunError: it does not import; what it says may be any error, for its libraries load then.
    """
    os.environ.update(VARIABLES)
    try:
        import vllm
    except Exception as error:
        raise broken("vllm does not import", error) from error
    return vllm


def broken(what: str, error: BaseException) -> RunError:
    """The clear end, with the cause in a line."""
    words = " ".join(str(error).split())
    cause = words if len(words) <= 300 else f"{words[:300]} ..."
    return RunError(Fault(field=FIELD, found="vllm", rule=f"{what} here: {type(error).__name__}: {cause}", fix=INSTEAD))


@contextmanager
def draws_from(seed: int) -> Iterator[None]:
    """vLLM's requests without a seed draw from the process's generators: seeded inside the block, and left as if
    nothing had been drawn. Torch's (v1/sample/ops/topk_topp_sampler.py:462), or where its newer runner gives each
    request a seed, numpy's (v1/worker/gpu/sample/states.py:53)."""
    kept = np.random.get_state()
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            np.random.set_state(kept)


def cache_bytes(config: Any, rows: int, tokens: int, element: int) -> int:
    """What the keys and values of so many sequences take, with room to spare.

    Args:
        config: the model's transformers configuration.
        rows: sequences at a time.
        tokens: of the longest sequence.
        element: bytes of a number.
    """
    text = config.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    pages = rows * -(-tokens // PAGE)
    return int(SPARE * 2 * text.num_hidden_layers * heads * size * element * pages * PAGE)


def answer_of(output: Any) -> Completion:
    """vLLM's CompletionOutput (outputs.py:22) as ours. A stop token is its last token, as it is without a detokenizer
    (v1/engine/detokenizer.py:40); each place has the log-prob of its token, under the distribution sampled from."""
    tokens = list(output.token_ids)
    assert output.finish_reason in ("stop", "length"), output.finish_reason
    scores = [place[token].logprob for token, place in zip(tokens, output.logprobs, strict=True)]
    return Completion(token_ids=tokens, log_probs=scores, finish_reason=output.finish_reason)


def take_weights(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy every weight into vLLM's model, and hold it to having had all it needs and used all it had.

    vLLM itself is silent about a name that never came, and its models skip most names that they do not know
    (model_executor/models/qwen2.py:473). It joins some weights (q, k and v in one) and gives back the joined names.
    """
    given: set[str] = set()

    def noted() -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in weights:
            given.add(name)
            yield name, value.detach()

    loaded = model.load_weights(noted())
    joined = getattr(model, "packed_modules_mapping", {})  # of vLLM's classes some have none
    missing = {name for name, _ in model.named_parameters()} - loaded
    for parts in (parts_of(name, joined) for name in loaded):
        missing |= parts - given if parts & given else set()
    unknown = {name for name in given if whole_of(name, joined) not in loaded and not is_elsewhere(name)}
    if unknown == given:  # a class that renames all of them; then its own words have to do
        unknown = set()
    assert not missing, f"missing {sorted(missing)[:3]}"
    assert not unknown, f"unknown {sorted(unknown)[:3]}"


def is_elsewhere(name: str) -> bool:
    """A head of its own is a parameter and among the loaded; else it is the embedding, which verl sends twice. Experts
    are joined by rules of their own."""
    return name == "lm_head.weight" or ".experts." in name


def parts_of(name: str, joined: dict[str, list[str]]) -> set[str]:
    """The names under which a joined weight comes: layers.0.self_attn.qkv_proj.weight is q_proj, k_proj and v_proj."""
    for whole, parts in joined.items():
        if f".{whole}." in name:
            return {name.replace(f".{whole}.", f".{part}.") for part in parts}
    return set()


def whole_of(name: str, joined: dict[str, list[str]]) -> str:
    """The other way: the name of what this weight is part of."""
    for whole, parts in joined.items():
        for part in parts:
            name = name.replace(f".{part}.", f".{whole}.")
    return name


class VllmGenerator:
    """Generates with one model in vLLM. Starts with weights that mean nothing: :meth:`load_weights` comes first.

    Args:
        folder: the model's folder; config.json is read, weights and tokenizer are not.
        dtype: of weights and products, "bfloat16".
        positions: tokens of the longest prompt and answer together.
        stop_token_ids: an answer ends with the first of these, which stays in it.
        seed: seeds the draws, with the numbers of :meth:`begin`.
        max_rows: sequences at a time; vLLM starts a waiting one as soon as another has ended.
        cache: bytes of keys and values. A sequence that finds no room waits, or starts over.
        share: the cache's share of the device's memory.
        eager: without graphs and compilation: starts sooner, generates slower.
        trust_remote_code: whether code that comes with the model may run.

    Raises:
        RunError: vllm does not import, or does not start with this model.
        torch.OutOfMemoryError: there is not enough room beside the trainer.
    """

    def __init__(
        self,
        folder: str,
        *,
        dtype: str,
        positions: int,
        stop_token_ids: Sequence[int],
        seed: int,
        max_rows: int,
        cache: int,
        share: float,
        eager: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        self.max_rows = max_rows
        self._stop = sorted(set(stop_token_ids))
        self._seed = seed
        self._numbers: tuple[int, ...] = ()
        self._drawn = 0  # answers since begin
        self._asleep = False
        vllm = load()
        self._params = vllm.SamplingParams
        try:
            self._llm = vllm.LLM(
                model=folder,
                skip_tokenizer_init=True,
                trust_remote_code=trust_remote_code,
                load_format="dummy",
                dtype=dtype,
                seed=seed,
                max_model_len=positions,
                max_num_seqs=max_rows,
                enforce_eager=eager,
                enable_sleep_mode=True,
                # answers of old weights must never be continued with new ones, and prompts here are short
                enable_prefix_caching=False,
                kv_cache_memory_bytes=cache,
                # the cache has its size, so this is only what must be free at the start (v1/worker/utils.py:405)
                gpu_memory_utilization=share,
                logprobs_mode="processed_logprobs",
                disable_log_stats=True,
            )
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise broken("vllm does not start", error) from error

    def begin(self, *numbers: int) -> None:
        """From here on the draws follow from the seed and these numbers, whatever was drawn before."""
        self._numbers, self._drawn = numbers, 0

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Every weight of the model, under its name in a transformers checkpoint, in any float type."""
        with torch.no_grad():
            self._llm.apply_model(lambda model: take_weights(model, weights))

    def release(self) -> None:
        """Give the device's memory back, weights and cache. Level 2: nothing is kept but buffers, which vLLM saves and
        restores by itself (v1/worker/gpu_worker.py:164)."""
        if not self._asleep:
            self._llm.sleep(level=2)
            self._asleep = True

    def resume(self, tag: str) -> None:
        """Take memory for "weights", whose values must then be sent, or for the "kv_cache", after which it can generate
        again."""
        if self._asleep:
            self._llm.wake_up(tags=[tag])
            self._asleep = tag != "kv_cache"

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[Sampling],
        on_tokens: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """One completion a prompt, in the order of the prompts.

        Args:
            prompts: token ids, at least one each.
            sampling: one setting a prompt.
            on_tokens: told the number of new tokens, once all are there.
        """
        assert all(len(prompt) > 0 for prompt in prompts), "an empty prompt: there is nothing to attend to"
        assert not self._asleep, "resume comes before the rollout"
        with draws_from(seed_of(self._seed, *self._numbers, self._drawn)):
            outputs = self._llm.generate(
                [{"prompt_token_ids": list(prompt)} for prompt in prompts],
                [self._request(one) for one in sampling],
                use_tqdm=False,
            )
        self._drawn += len(outputs)
        answers = [answer_of(output.outputs[0]) for output in outputs]
        if on_tokens is not None:
            on_tokens(sum(len(answer.token_ids) for answer in answers))
        return answers

    def _request(self, sampling: Sampling) -> Any:
        """vLLM's settings of one request. Without a seed of its own, with which vLLM would draw row by row."""
        return self._params(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=self._stop,
            logprobs=0,  # that of the drawn token, and none beside it
            detokenize=False,
        )
