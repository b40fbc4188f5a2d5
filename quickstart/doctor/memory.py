"""The memory plan: what each role holds in each phase, on the device and in host memory, before anything is loaded.

For one process on one device as it is set up here: whole models (plugin/shims.py leave_whole), master weights in
float32, products in the compute dtype by autocast, gradients only inside an update, the rollout engine's own copy of
the weights in the compute dtype. All numbers are bytes. They assume that every answer is as long as it may be.

    weights        4 P a trained role (2 or 4 P the rollout engine's copy; the reference 4 P, on a GPU 2 P
                   and 4 for its embedding)
    gradients      4 P during its update (in a single pass: as activations go, see `beside`); on a GPU, for models that
                   replay graphs (plugin/graphed_body.py), those of the body in one buffer for all roles, all the time
    Adam           8 P after the first update
    passes         without gradients, on a GPU: one layer of many rows, 3 i in the compute dtype and 4 h a token
    activations    kept for the backward pass, a layer and token: 24 h + 20 a + 16 i in float32, 20 h + 10 a + 8 i in
                   bfloat16 (h width, a heads x head size, i inner width), with checkpointing 4 h and one layer in full;
                   plugin/lean_layers.py keeps less of it on a GPU
    logits         on a CPU of one micro batch: see LOGITS; on a GPU of FUSED_TOKENS at most (plugin/fused_head.py)
    KV cache       2 x layers x key-value heads x head size x tokens x compute dtype, all answers of a step

Error against measured peaks (resident memory of whole processes on a CPU, scripts/measure_memory_plan.py):
    -3 % to +10 %   8 runs of 1.2 to 5.3 GB to which the constants were adjusted: PPO, GRPO, DPO, LoRA, bfloat16,
                    checkpointing; +10 % is a Qwen2 of half the width of Qwen2-0.5B with its whole vocabulary
    +1 %            GRPO without reference, not looked at before
    -1 % to -13 %   three repeats of PPO with accumulation, not looked at before: verl 0.9.1 gives the critic a whole
                    update in one pass unless told otherwise; split as planned here it is +2 % and +3 %
    +23 %           the bundled model, whose answers end before they are as long as they may be
Repeats of one run differ by up to 13 %. On a GPU (H200, nvidia-smi, scripts/bench_gpu.py, Qwen2-0.5B's shape, bfloat16;
the plan keeps RESERVE free for it):
    -5 % to +2 %    PPO of 100 and 400 prompts with 128 new tokens, of 100 with 512, GRPO: 17.8 to 33.2 GiB
    -7 %            DPO in 5 passes an update, 21.5 GiB
A run with a memory budget takes all of it: what torch frees it keeps up to the cap.

Not here: what the machine has (machine.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from quickstart.arguments import CRITIC_TYPES, PREFERENCE_TYPES, REFERENCE_PREFERENCE_TYPES, RunConfig
from quickstart.config import kl_place, samples_per_step
from quickstart.doctor.parameters import ModelShape
from quickstart.doctor.sizes import FLOAT, Sizes, activations, sizes_of

Phase = Literal["rollout", "log-probs", "critic update", "actor update", "save"]
Place = Literal["device", "host"]
PHASES: tuple[Phase, ...] = ("rollout", "log-probs", "critic update", "actor update", "save")

ADAM = 8  # two float32 moments
# LOGITS: bytes for each (token of a micro batch) x (entry of the vocabulary) on a CPU. Without gradients, by bytes of
# the compute dtype: logits, their copy without padding, log-softmax in float32, entropy's softmax and product. In the
# update: logits, copy, log-softmax and the gradients of these; the zeros in the first of them are hardly touched.
LOGITS_FORWARD = {4: 12, 2: 14}
LOGITS_UPDATE = 14
# On a GPU logits exist for so many tokens at once, with log-softmax and probabilities in float32 beside them.
FUSED_TOKENS = 512  # plugin/fused_head.py, CHUNK
LOGITS_FUSED = 12
INFERENCE_TOKENS = 49152  # of a GPU's pass without gradients at most (verl_config)
SAMPLING = 20  # bytes a row and vocabulary entry beside the logits: scaled, log-probs, noise, two products
HOST_BASE = 750 * 10**6  # Python with torch, transformers, verl and ray imported
DEVICE_BASE = 850 * 10**6  # CUDA context and libraries: what nvidia-smi shows beyond torch, on an H200
RESERVE = 0.1  # share of a GPU kept free for what the plan does not see (fragmentation, graphs)


@dataclass(frozen=True, kw_only=True)
class Item:
    """One kind of memory of one role, and where it lies in each phase; a phase without it is left out."""

    role: str
    kind: str
    size: int  # bytes
    where: Mapping[Phase, Place]


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """All items of a run."""

    items: tuple[Item, ...]
    phases: tuple[Phase, ...]

    def total(self, place: Place, phase: Phase) -> int:
        """Bytes in one place during one phase."""
        return sum(item.size for item in self.items if item.where.get(phase) == place)

    def peak(self, place: Place) -> tuple[int, Phase]:
        """The largest of the phases."""
        return max((self.total(place, phase), phase) for phase in self.phases)

    def largest(self, place: Place, phase: Phase, number: int = 4) -> list[Item]:
        """What takes most there and then."""
        there = [item for item in self.items if item.where.get(phase) == place]
        return sorted(there, key=lambda item: -item.size)[:number]

    def table(self, place: Place) -> dict[str, dict[str, int]]:
        """ "role, kind" -> phase -> bytes; all phases in each row."""
        found: dict[str, dict[str, int]] = {}
        for item in self.items:
            if place in item.where.values():
                row = found.setdefault(f"{item.role}, {item.kind}", dict.fromkeys(self.phases, 0))
                for phase in self.phases:
                    row[phase] += item.size if item.where.get(phase) == place else 0
        return found


def memory_plan(
    cfg: RunConfig,
    shape: ModelShape,
    *,
    critic: ModelShape | None = None,
    reward_parameters: int = 0,
    longest_prompt: int | None = None,
) -> MemoryPlan:
    """The plan of a run.

    Args:
        cfg: resolved settings, no "auto" left.
        shape: the policy; critic: the value model's own checkpoint, None: it starts from the policy.
        reward_parameters: of a reward model, 0 without one.
        longest_prompt: of the data, in tokens; None: as long as it may be.
    """
    sizes = sizes_of(cfg, shape, critic, reward_parameters, longest_prompt)
    phases = tuple(phase for phase in PHASES if phase in phases_of(cfg))
    items = [*process(cfg, phases), *buffers(cfg, sizes, phases), *actor(cfg, sizes, phases), *forward(cfg, sizes)]
    if cfg.rl.rl_type not in PREFERENCE_TYPES:
        items += [*rollout(sizes, phases), *reference(cfg, sizes, phases), *reward(cfg, sizes, phases)]
    if cfg.rl.rl_type in CRITIC_TYPES:
        items += critic_items(cfg, sizes, phases)
    if cfg.training.device == "cpu":
        items = [dataclasses.replace(item, where=dict.fromkeys(item.where, "host")) for item in items]
    return MemoryPlan(items=tuple(items), phases=phases)


def phases_of(cfg: RunConfig) -> set[Phase]:
    """The phases that this run goes through."""
    found: set[Phase] = {"actor update"}
    if cfg.training.save_steps != "never":
        found.add("save")
    if cfg.rl.rl_type in PREFERENCE_TYPES:
        return found | ({"log-probs"} if cfg.rl.rl_type in REFERENCE_PREFERENCE_TYPES else set())
    found.add("rollout")
    if cfg.rl.rl_type in CRITIC_TYPES:
        found.add("critic update")
    if bool(cfg.rl.recompute_old_log_probs) or kl_place(cfg) != "none":
        found.add("log-probs")
    return found


def spread(phases: Iterable[Phase], place: Place, busy: Mapping[Phase, Place] | None = None) -> dict[Phase, Place]:
    """In one place in all phases but for `busy` ones."""
    return {phase: (busy or {}).get(phase, place) for phase in phases}


def busy_in(*names: Phase) -> dict[Phase, Place]:
    """On the device during these phases."""
    return dict.fromkeys(names, "device")


def process(cfg: RunConfig, phases: tuple[Phase, ...]) -> list[Item]:
    """What an empty process takes."""
    items = [Item(role="process", kind="libraries", size=HOST_BASE, where=spread(phases, "host"))]
    if cfg.training.device != "cpu":
        items.append(Item(role="process", kind="CUDA context", size=DEVICE_BASE, where=spread(phases, "device")))
    return items


def graphed_roles(cfg: RunConfig) -> tuple[str, ...]:
    """The trained models that replay graphs: on a GPU, where weights stay in place (graphed_body.can_graph)."""
    model, roles = cfg.model, [("actor", cfg.rl.actor_offload)]
    if cfg.training.device == "cpu" or model.lora_rank or model.gradient_checkpointing or model.use_flash_attention_2:
        return ()
    if cfg.rl.rl_type in CRITIC_TYPES:
        roles.append(("critic", cfg.rl.critic_offload))
    return tuple(role for role, offload in roles if offload is None)


def buffers(cfg: RunConfig, sizes: Sizes, phases: tuple[Phase, ...]) -> list[Item]:
    """The gradients of a body that graphs add up: one buffer, as large as the largest of the bodies that share it."""
    size = FLOAT * max((sizes.graphed[role] for role in graphed_roles(cfg)), default=0)
    where = spread(phases, "device")
    return [Item(role="process", kind="shared gradients", size=size, where=where)] if size else []


def actor(cfg: RunConfig, sizes: Sizes, phases: tuple[Phase, ...]) -> list[Item]:
    """The policy: weights, gradients, Adam, and what a checkpoint copies."""
    rests: Place = "host" if cfg.rl.actor_offload else "device"
    weights = sizes.shape.parameters + (sizes.trainable if cfg.model.lora_rank else 0)
    working = busy_in("log-probs", "actor update", "save")
    copies = (
        1 if cfg.training.device == "cpu" else 2
    )  # of the whole model: bytes for safetensors; from the GPU one more
    items = [
        Item(role="actor", kind="weights", size=FLOAT * weights, where=spread(phases, rests, working)),
        Item(role="actor", kind="gradients", size=policy_gradients(cfg, sizes), where=busy_in("actor update")),
        Item(
            role="actor",
            kind="Adam",
            size=ADAM * sizes.trainable,
            where=spread(phases, rests, busy_in("actor update")),
        ),
    ]
    if cfg.model.lora_rank:
        items += merging(cfg, sizes, phases)
    if "save" in phases:
        size = copies * FLOAT * sizes.shape.parameters
        items.append(Item(role="actor", kind="copy for the checkpoint", size=size, where={"save": "host"}))
    return items


def merging(cfg: RunConfig, sizes: Sizes, phases: tuple[Phase, ...]) -> list[Item]:
    """To hand out merged weights verl keeps the base weights aside (fsdp_utils.py:963), and a checkpoint copies them.

    On a CPU the heap keeps room that is free again, and a measured peak has these copies on top of every phase.
    """
    size = FLOAT * sizes.shape.parameters
    if cfg.training.device == "cpu":
        return [Item(role="actor", kind="copies for merging adapters", size=2 * size, where=spread(phases, "host"))]
    lent = busy_in(*(phase for phase in ("rollout", "save") if phase in phases))
    items = [Item(role="actor", kind="base weights set aside", size=size, where=lent)]
    return items + [Item(role="actor", kind="merged weights", size=size, where=busy_in("save"))] * ("save" in phases)


def critic_items(cfg: RunConfig, sizes: Sizes, phases: tuple[Phase, ...]) -> list[Item]:
    """The value model."""
    rests: Place = "host" if cfg.rl.critic_offload else "device"
    size, update = sizes.critic_parameters, busy_in("critic update")
    half = [] if sizes.compute == FLOAT else [("weights in half precision", 2 * size)]
    gradients = beside(cfg, FLOAT * size, activations(sizes), 0)
    if "critic" in graphed_roles(cfg):
        gradients = beside_buffer(FLOAT * size, FLOAT * sizes.graphed["critic"], activations(sizes))
    inside = [("gradients", gradients), ("activations", activations(sizes)), *half]
    return [
        Item(role="critic", kind="weights", size=FLOAT * size, where=spread(phases, rests, update)),
        Item(role="critic", kind="Adam", size=ADAM * size, where=spread(phases, rests, update)),
        *(Item(role="critic", kind=kind, size=bytes_, where=update) for kind, bytes_ in inside),
    ]


def reference(cfg: RunConfig, sizes: Sizes, phases: tuple[Phase, ...]) -> list[Item]:
    """The frozen first policy. With LoRA it is the policy without its adapters (verl's ref_in_actor)."""
    if kl_place(cfg) == "none" or cfg.model.lora_rank:
        return []
    rests: Place = "host" if cfg.rl.reference_offload else "device"
    embedding = sizes.shape.vocabulary * sizes.shape.hidden
    rest = sizes.compute if cfg.training.device != "cpu" else FLOAT  # lean_layers.store_products
    size = FLOAT * embedding + rest * (sizes.shape.parameters - embedding)
    return [Item(role="reference", kind="weights", size=size, where=spread(phases, rests, busy_in("log-probs")))]


def reward(cfg: RunConfig, sizes: Sizes, phases: tuple[Phase, ...]) -> list[Item]:
    """A reward model, which scores right after the rollout."""
    if not sizes.reward_parameters:
        return []
    rests: Place = "host" if cfg.rl.reward_offload else "device"
    size = sizes.compute * sizes.reward_parameters
    return [Item(role="reward", kind="weights", size=size, where=spread(phases, rests, busy_in("rollout")))]


def rollout(sizes: Sizes, phases: tuple[Phase, ...]) -> list[Item]:
    """The engine's copy of the weights, its cache, and the logits of one place."""
    shape, rows = sizes.shape, sizes.answers
    cache = 2 * shape.layers * shape.kv_heads * shape.head_dim * rows * sizes.tokens * sizes.compute
    growing = cache // shape.layers  # a cache that grows is copied a layer at a time
    sampling = rows * shape.vocabulary * (sizes.compute + SAMPLING)
    weights = sizes.compute * shape.parameters
    return [
        Item(role="rollout engine", kind="weights", size=weights, where=spread(phases, "device")),
        Item(role="rollout engine", kind="KV cache", size=cache + growing, where=busy_in("rollout")),
        Item(role="rollout engine", kind="logits", size=sampling, where=busy_in("rollout")),
    ]


def logits(cfg: RunConfig, sizes: Sizes, on_cpu: int) -> int:
    """What logits take in a pass. on_cpu: bytes of a token and entry on a CPU."""
    spots = sizes.rows * sizes.tokens
    if cfg.training.device == "cpu":
        return spots * sizes.shape.vocabulary * on_cpu
    return min(spots, FUSED_TOKENS) * sizes.shape.vocabulary * LOGITS_FUSED


def inference(cfg: RunConfig, sizes: Sizes) -> int:
    """One layer of a pass without gradients: a micro batch, or up to INFERENCE_TOKENS of the rows of a step."""
    tokens = min(samples_per_step(cfg) * sizes.tokens, INFERENCE_TOKENS)
    each = 3 * sizes.compute * sizes.shape.intermediate + FLOAT * sizes.shape.hidden
    return max(tokens, sizes.rows * sizes.tokens) * each


def policy_gradients(cfg: RunConfig, sizes: Sizes) -> int:
    """The policy's gradients at the moment of most memory. That of the output head comes first, before logits go."""
    head = 0 if cfg.model.lora_rank else FLOAT * sizes.shape.vocabulary * sizes.shape.hidden
    passing = activations(sizes) + logits(cfg, sizes, LOGITS_UPDATE)
    if "actor" in graphed_roles(cfg):
        return beside_buffer(FLOAT * sizes.trainable, FLOAT * sizes.graphed["actor"], activations(sizes))
    return beside(cfg, FLOAT * sizes.trainable, passing, head)


def beside_buffer(gradients: int, shared: int, kept: int) -> int:
    """Gradients of a graphed model apart from the shared buffer: those of embedding and head, and what a replay makes
    before it adds it to the buffer, in the room of the activations that it kept."""
    return gradients - shared + max(shared - kept, 0)


def beside(cfg: RunConfig, gradients: int, passing: int, first: int) -> int:
    """Gradients that lie beside activations and logits. passing: these; first: gradients made before they go.

    Where passes are added up, the gradients of the pass before are all there. In a single pass they come as activations
    and logits go, so that the moment of most memory has either these or all gradients.
    """
    if cfg.rl.gradient_accumulation_steps > 1:
        return gradients
    return max(gradients - passing, min(first, gradients))


def forward(cfg: RunConfig, sizes: Sizes) -> list[Item]:
    """What the policy's passes take beside its weights."""
    size = logits(cfg, sizes, LOGITS_UPDATE)
    items = [
        Item(role="actor", kind="activations", size=activations(sizes), where=busy_in("actor update")),
        Item(role="actor", kind="logits", size=size, where=busy_in("actor update")),
    ]
    if "log-probs" in phases_of(cfg):
        size = logits(cfg, sizes, LOGITS_FORWARD[sizes.compute])  # on a GPU of more rows; a chunk all the same
        items.append(Item(role="actor", kind="logits", size=size, where=busy_in("log-probs")))
        if cfg.training.device != "cpu" and cfg.rl.rl_type not in PREFERENCE_TYPES:
            size = inference(cfg, sizes)
            items.append(Item(role="actor", kind="pass without gradients", size=size, where=busy_in("log-probs")))
    if sizes.compute < FLOAT:  # autocast keeps its casts of the weights until the pass is over
        size = sizes.compute * sizes.shape.parameters
        where = busy_in(*(p for p in ("actor update", "log-probs") if p in phases_of(cfg)))
        items.append(Item(role="actor", kind="weights in half precision", size=size, where=where))
    return items
