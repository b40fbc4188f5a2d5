"""Out of memory in the middle of a run: one retry at half the batch, then one clear end instead of a traceback.

A micro batch only splits a mini batch: verl adds up the losses of its micro batches, each weighed by its share. So a
pass that did not fit is done again in halves, with the same gradients, and the run stays at the half. That happens once
a run for updates and log-probs (:class:`Halving`) and once for answers (plugin/rollout.py); the next time is the end,
a RunError with the figures of the moment and what to lower. One device only: ranks would have to agree.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from verl.utils import tensordict_utils as tu

from quickstart.errors import Fault, RunError
from quickstart.plugin.graphed_body import release_graphs

FIELD = "rl.per_device_train_batch_size"
GB = 10**9
OTHERS = 10**9  # bytes that other processes must hold to be named: this one's CUDA context is counted with them
# How it is said where it is no OutOfMemoryError: CUDA's own allocations (by torch, and by vllm's allocator as it
# wakes), cuBLAS's workspace, and the host's memory.
WORDS = (
    "CUDA error: out of memory",
    "CUDA Error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
)
LOWER = (
    f"lower {FIELD} (and raise rl.gradient_accumulation_steps: the same update), data.max_response_length or "
    "data.max_prompt_length, or set model.gradient_checkpointing=true, rl.actor_offload=cpu or model.lora_rank=16"
)
LOWER_ANSWERS = (
    "lower data.max_response_length, rl.rollout_batch_size or rl.num_generations, or set rl.actor_offload=cpu"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, whoever says so."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in WORDS)


def memory_words() -> str:
    """What this process has, what is free, and what others hold on its GPU; on a CPU nothing."""
    if not torch.cuda.is_available():
        return ""
    free, total = torch.cuda.mem_get_info()
    others = total - free - torch.cuda.memory_reserved()
    parts = [f"{torch.cuda.memory_allocated() / GB:.1f} GB in use by this run"]
    parts += [f"{free / GB:.1f} of {total / GB:.1f} GB free on the GPU"]
    parts += [f"{others / GB:.1f} GB held by other processes"] if others > OTHERS else []
    return f" ({', '.join(parts)})"


def out_of_memory(what: str, memory: str, rule: str, fix: str = LOWER) -> RunError:
    """The clear end.

    Args:
        what: what was running, "update of the actor".
        memory: the figures, taken when it failed.
        rule: why it was not tried again.
        fix: what to lower.
    """
    if torch.cuda.is_available():
        fix = f"end other programs on the GPU (nvidia-smi lists them); {fix}"
    return RunError(Fault(field=what, found=f"out of memory{memory}", rule=rule, fix=fix))


@contextlib.contextmanager
def clear_end(what: Callable[[], str], fix: str = LOWER) -> Iterator[None]:
    """Whatever runs out of memory inside, and is not tried again there, ends with a RunError."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory(what(), memory_words(), "only passes and answers are tried again in halves", fix) from None


def attempt(run: Callable[[], Any]) -> tuple[Any, str | None]:
    """What `run` gives; or None and the memory figures, where memory ran out.

    By the time this returns the error is gone, and with it the frames that held on to the pass's tensors.
    """
    try:
        return run(), None
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None, memory_words()


def free_cached() -> None:
    """Give back what the allocator keeps."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Halving:
    """Passes of verl's engine, halved for the rest of the run once one of them did not fit.

    Args:
        size: rl.per_device_train_batch_size; None: not known, nothing is said of it.
        tell: told once; also of what else goes otherwise than planned in these passes.
    """

    def __init__(self, size: int | None = None, tell: Callable[[str], None] = print) -> None:
        self._size, self.tell = size, tell
        self.done = False

    def around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Stands for verl's FSDPEngine.forward_backward_batch, of which `original` is the text."""

        def forward_backward_batch(self_: Any, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
            if self.done:
                halve(data)
            result, failed = attempt(lambda: original(self_, data, loss_function, forward_only))
            if failed is None:
                return result
            what = pass_words(self_, forward_only)
            start_over(self_, forward_only)
            if self.done:
                raise out_of_memory(what, failed, "the batch was halved before, and does not fit again")
            self._halve_and_tell(data, what, failed)
            result, failed = attempt(lambda: original(self_, data, loss_function, forward_only))
            if failed is not None:
                raise out_of_memory(what, failed, "half the batch does not fit either")
            return result

        return forward_backward_batch

    def _halve_and_tell(self, data: Any, what: str, memory: str) -> None:
        change = halve(data)
        if change is None:
            raise out_of_memory(what, memory, "a batch of one cannot be halved")
        self.done = True
        old, new, unit = change
        self.tell(
            f"Warning: out of memory in the {what}{memory}. It is done again, with the same result, and the run goes "
            f"on at {new} instead of {old} {unit} at a time{self._field_words(*change)}"
        )

    def _field_words(self, old: int, new: int, unit: str) -> str:
        """The setting that stands behind it. Log-probs may be taken of more rows at once than an update."""
        if self._size in (None, 1) or unit == "tokens":
            return ""
        half = new if old == self._size else self._size // 2
        return f" ({FIELD} {self._size} -> {half})"


def halve(data: Any) -> tuple[int, int, str] | None:
    """Let verl cut this batch into micro batches of half the size. Gives old and new size and their unit.

    None where it cannot be halved: one row, one pair, or one row as long as a micro batch may be. A group stays whole.
    """
    group = tu.get_non_tensor_data(data, key="force_group_size", default=1)
    if tu.get_non_tensor_data(data, key="use_dynamic_bsz", default=True):
        lengths = data["input_ids"].offsets().diff().view(-1, group).sum(1)
        old = data["max_token_len_per_gpu"]
        new = max(old // 2, int(lengths.max()))
        tu.assign_non_tensor(data, max_token_len_per_gpu=new)
        return (old, new, "tokens") if new < old else None
    old = data["micro_batch_size_per_gpu"]
    units = len(data) // group
    new = max((n for n in range(1, old // 2 + 1) if units % n == 0), default=old)
    tu.assign_non_tensor(data, micro_batch_size_per_gpu=new)
    return (old, new, "rows" if group == 1 else "pairs") if new < old else None


def pass_words(engine: Any, forward_only: bool) -> str:
    """The role and what it did: update of the actor, log-probs of the reference."""
    critic = "ValueHead" in type(engine).__name__
    role = "critic" if critic else "reference" if engine.engine_config.forward_only else "actor"
    work = ("values" if critic else "log-probs") if forward_only else "update"
    return f"{work} of the {role}"


def start_over(engine: Any, forward_only: bool) -> None:
    """Throw away what the failed pass left: its gradients, its graphs, and what the allocator keeps of it."""
    if not forward_only:
        engine.optimizer_zero_grad()
    release_graphs(engine.module)
    free_cached()
