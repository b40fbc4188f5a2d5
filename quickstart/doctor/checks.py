"""Who looks at what: the list of checks, each a few lines from facts to judges.

ENVIRONMENT needs no model and no data, MODEL the model's files, RUN the rows too. Checks that ask a child process are
apart (IMPORTS): they take seconds, and a training run does without.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from quickstart.arguments import CRITIC_TYPES, ROLLOUT_TYPES
from quickstart.data.prepare import cache_folder
from quickstart.doctor import (
    accelerator,
    architecture,
    budget,
    fit,
    hub,
    machine,
    packages,
    plan,
    rewardtest,
    rows,
    settings,
)
from quickstart.doctor.facts import CRITIC, POLICY, REWARD, TOKENIZER, Facts
from quickstart.doctor.finding import Finding, note, ok
from quickstart.doctor.parameters import millions
from quickstart.doctor.running import Check
from quickstart.doctor.sizes import FLOAT
from quickstart.doctor.tokens import judge_positions, judge_template, judge_tokens
from quickstart.outputs import MIN_FREE_BYTES
from quickstart.outputs import check as check_output
from quickstart.rewards.model_check import check_reward_model

DISK_FIX = "free some space there, or name another folder"


def environment_checks(facts: Facts) -> list[Check]:
    """A second at most, without importing torch."""

    def host() -> Iterable[Finding]:
        there = facts.machine
        yield machine.judge_platform(there)
        yield machine.judge_python(there)
        yield machine.judge_encoding(there)
        yield machine.judge_cpus(there, facts.cfg_or_none)
        yield machine.judge_memory(there)
        yield machine.judge_shared_memory(there, uses_ray(facts))

    def versions() -> Iterable[Finding]:
        on_gpu = facts.device == "cuda"
        yield from packages.judge_packages(packages.wanted_versions(), packages.installed, on_gpu=on_gpu)
        yield from packages.judge_bytecode(packages.uncompiled(), kept=not sys.dont_write_bytecode)

    def torch() -> Iterable[Finding]:
        build, driver = accelerator.torch_build(), accelerator.driver_cuda()
        yield accelerator.judge_torch(build, driver, facts.device)
        yield from accelerator.judge_idle_gpu(build, driver, facts.probe, facts.device)

    def gpu() -> Iterable[Finding]:
        yield from accelerator.judge_gpu(facts.probe.gpus if facts.device == "cuda" else (), facts.cfg)

    def vllm() -> Iterable[Finding]:
        version = packages.installed("vllm")
        yield accelerator.judge_vllm(version, packages.torch_of("vllm"), accelerator.torch_build(), facts.cfg)

    return [
        Check("host", host),
        Check("packages", versions),
        Check("torch", torch),
        Check("gpu", gpu),
        Check("vllm", vllm),
    ]


def import_checks(facts: Facts) -> list[Check]:
    """What only an import shows; the children were started before (facts.start_children)."""

    def stack() -> Iterable[Finding]:
        answer = facts.child("stack")
        assert answer is not None, "started by the command"
        cfg = facts.cfg_or_none
        devices = 1 if cfg is None or cfg.training.num_devices == "auto" else cfg.training.num_devices
        yield accelerator.judge_collectives(answer, devices)
        if "gloo" in answer.facts:
            yield accelerator.judge_plugin(answer)

    def kernel() -> Iterable[Finding]:
        answer = facts.child("kernel")
        yield ok("cuda kernel", "no GPU in use") if answer is None else accelerator.judge_kernel(answer)

    def flash() -> Iterable[Finding]:
        build = accelerator.torch_build()
        version = packages.installed("flash-attn")
        torch = build.version if build else "unknown"
        yield accelerator.judge_flash(version, facts.child("flash"), torch, facts.cfg)

    def vllm() -> Iterable[Finding]:
        answer = facts.child("vllm")
        if answer is not None:
            yield accelerator.judge_vllm_import(answer)

    return [
        Check("imports", stack),
        Check("cuda kernel", kernel),
        Check("flash-attn", flash),
        Check("vllm import", vllm),
    ]


def config_checks(facts: Facts) -> list[Check]:
    """The settings themselves."""

    def settings_file() -> Iterable[Finding]:
        cfg = facts.cfg
        where = cfg.source.config_path or "Python"
        profile = f", profile {cfg.source.profile}" if cfg.source.profile else ""
        yield ok("config", f"{where}{profile}: all settings are legal")
        for notice in cfg.source.notices:
            yield note("config", notice)

    return [Check("config", settings_file)]


def disk_checks(facts: Facts) -> list[Check]:
    """Where a run writes."""

    def outputs() -> Iterable[Finding]:
        root = check_output(facts.cfg.training.output_dir)
        disk = machine.disk_of(root)
        yield machine.judge_disk(disk, "outputs", disk_need(facts), DISK_FIX, "training.output_dir")

    def caches() -> Iterable[Finding]:
        cache = machine.disk_of(cache_folder(facts.cfg))
        yield machine.judge_disk(cache, "converted data", 0, DISK_FIX, "data.cache_dir")
        yield machine.judge_disk(machine.disk_of(machine.hub_folder()), "hub cache", 0, DISK_FIX)
        yield machine.judge_ray_disk(machine.disk_of(machine.ray_folder()), uses_ray(facts))

    return [Check("disk: outputs", outputs), Check("disk: caches", caches)]


def hub_checks(facts: Facts) -> list[Check]:
    """Only where something must come from it."""

    def reach() -> Iterable[Finding]:
        address = hub.hub_address()
        needed = hub.needed_from_hub(facts.cfg)
        yield hub.judge_hub(needed, address, offline=hub.hub_offline(), reachable=lambda: hub.hub_reachable(address))

    return [Check("hub", reach)]


def model_checks(facts: Facts) -> list[Check]:
    """The models' files."""

    def folders() -> Iterable[Finding]:
        yield ok("model folder", f"{facts.model}: complete")

    def others() -> Iterable[Finding]:
        for field in (TOKENIZER, CRITIC):
            if (field != CRITIC or needs_critic(facts)) and (folder := facts.folder(field)):
                yield ok("model folder", f"{folder}: complete ({field})")

    def policy() -> Iterable[Finding]:
        yield architecture.judge_policy(
            facts.model_config,
            facts.architectures,
            POLICY,
            trusts_code=facts.cfg.model.trust_remote_code,
            needs_critic=needs_critic(facts),
        )
        yield architecture.judge_size(facts.shape, POLICY)
        yield judge_positions(facts.shape.positions if facts.shape else None, facts.cfg)

    def template() -> Iterable[Finding]:
        yield judge_template(facts.cfg, has_template=facts.has_template)

    def tokenizer() -> Iterable[Finding]:
        yield from judge_tokens(facts.tokens, facts.tokenizer_field)

    return [
        Check("model folder", folders),
        Check("model folder", others),
        Check("architecture", policy),
        Check("chat template", template),
        Check("tokenizer", tokenizer),
        *reward_model_checks(facts),
    ]


def reward_model_checks(facts: Facts) -> list[Check]:
    """Only where rl.reward is a model."""

    def model() -> Iterable[Finding]:
        if facts.cfg_or_none is None or not facts.uses_reward_model:
            return
        folder = facts.folder(REWARD)
        assert folder is not None, "config.rules asks for it"
        check_reward_model(str(folder), facts.cfg.model.trust_remote_code)
        yield ok("reward model", f"{folder}: one output, {millions(facts.reward_parameters)} parameters")

    return [Check("reward model", model)]


def run_checks_of(facts: Facts, reward_seconds: float) -> list[Check]:
    """Rows, plans, settings and reward."""

    def data() -> Iterable[Finding]:
        yield from rows.judge_rows(facts.training_rows)
        yield from rows.judge_lengths(facts.lengths, facts.cfg)

    def batches() -> Iterable[Finding]:
        yield from plan.judge_batches(facts.cfg, facts.batches)

    def memory() -> Iterable[Finding]:
        cfg = facts.cfg
        if cfg.training.memory_budget_gb is not None and "choices" in facts.known:  # a run has changed them already
            fitted = facts.within_budget(facts.known["choices"])
            yield fit.judge_fit(cfg, fitted)
            cfg = fitted.cfg
        wanted = facts.plan_memory(cfg)
        place = budget.place_of(cfg)
        ways = budget.savings(cfg, wanted, place, facts.plan_memory)
        yield from budget.judge_budget(wanted, facts.machine, device_bytes(facts), ways, device_free(facts))
        yield from budget.judge_savings(ways)

    def values() -> Iterable[Finding]:
        known = settings.Known(
            cfg=facts.cfg, plan=facts.batches, lengths=facts.lengths, shape=facts.attempt(lambda: facts.shape)
        )
        yield from settings.judge_settings(known)

    def reward() -> Iterable[Finding]:
        yield from reward_findings(facts, reward_seconds)

    return [
        Check("data", data),
        Check("batch plan", batches),
        Check("memory plan", memory),
        Check("settings", values),
        Check("reward self-test", reward),
    ]


def reward_findings(facts: Facts, seconds: float) -> Iterable[Finding]:
    """The reward on some rows; nothing where the method has none."""
    if facts.cfg.rl.rl_type not in ROLLOUT_TYPES:
        return
    if facts.cfg.rl.reward == "model":
        yield note(rewardtest.CHECK, "not tried: that would load the reward model's weights")
        return
    guard, samples = facts.reward, facts.training_rows.samples
    if rewardtest.runs_programs(samples, guard):
        yield note(rewardtest.CHECK, "not tried: the ground truth of these rows is a program's test cases")
        return
    trials = rewardtest.try_reward(guard, samples, seconds)
    yield from rewardtest.judge_reward(trials, samples, guard.name)


def needs_critic(facts: Facts) -> bool:
    """Whether a value model is trained."""
    return facts.cfg.rl.rl_type in CRITIC_TYPES


def uses_ray(facts: Facts) -> bool:
    """Whether a cluster is started."""
    cfg = facts.cfg_or_none
    return cfg is not None and cfg.training.backend == "ray"


def device_bytes(facts: Facts) -> int | None:
    """Device memory that may be used; None on a CPU."""
    card = facts.card_bytes
    if card is None or facts.cfg.training.memory_budget_gb is None:
        return card
    return fit.budget_bytes(facts.cfg, card)


def device_free(facts: Facts) -> int | None:
    """Device memory that nobody holds; None where there is no GPU, or it is not known."""
    return facts.probe.gpus[0].free_bytes if facts.cfg.training.device == "cuda" else None


def disk_need(facts: Facts) -> int:
    """Bytes that checkpoints will take: weights, Adam and the exported model, as often as they are kept."""
    training = facts.cfg.training
    shape = facts.attempt(lambda: facts.shape)
    if shape is None or training.save_steps == "never":
        return MIN_FREE_BYTES
    trained = shape.parameters * (2 if needs_critic(facts) else 1)
    kept = 1 if training.save_steps == "end" else training.save_total_limit
    return MIN_FREE_BYTES + kept * (3 * FLOAT * trained + FLOAT * shape.parameters)
