"""The optimizer that verl is told to build can step as verl steps it, in every precision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

import local_runs
import preference_runs
import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from quickstart import verl_config
from quickstart.arguments import RunConfig
from quickstart.trainers.environment import process_group

DTYPES = ("float32", "bfloat16", "float16")
OPTIMIZERS = ("actor_rollout_ref.actor.optim", "critic.optim")


def on_cuda(cfg: RunConfig, dtype: str) -> RunConfig:
    """The settings of the same run on a GPU, which need not be there."""
    model, training = replace(cfg.model, torch_dtype=dtype), replace(cfg.training, device="cuda")
    return replace(cfg, model=model, training=training)


def cuda_keys(model: Path, dtype: str, folder: Path) -> dict[str, Any]:
    """verl's keys of a PPO run on a GPU."""
    cfg = on_cuda(local_runs.settings(model), dtype)
    reward, name = local_runs.REWARD_FILE, "compute_score"
    paths = verl_config.RunPaths(
        train=folder, evaluation=folder, checkpoints=folder, reward_file=reward, reward_name=name, reward_kwargs={}
    )
    return verl_config.translate(cfg, paths, device="cuda", steps=1)


def cuda_preference_keys(model: Path, dtype: str, folder: Path) -> dict[str, Any]:
    """verl's keys of a DPO run on a GPU."""
    cfg = on_cuda(preference_runs.settings(model, "dpo", folder), dtype)
    return verl_config.translate_preference(cfg, chat_template=None, steps=1)


def options(keys: dict[str, Any]) -> list[dict[str, Any]]:
    """What each optimizer of these keys is given beside verl's own arguments (workers/config/optimizer.py)."""
    made = [name for name in OPTIMIZERS if f"{name}.lr" in keys]
    return [keys.get(f"{name}.override_optimizer_config", {}) for name in made]


@pytest.mark.parametrize("of", [cuda_keys, cuda_preference_keys])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_update_goes_through_verls_scaler(of: Any, dtype: str, tiny_tied: Path, tmp_path: Path) -> None:
    """float16: verl's engine takes torch's sharded scaler (transformer_impl.py), whose found_inf is a list of one."""
    for given in options(of(tiny_tied, dtype, tmp_path)):
        weight = torch.nn.Parameter(torch.ones(4))
        optimizer = torch.optim.AdamW([weight], lr=0.1, **given)
        with process_group():
            scaler = ShardedGradScaler(device="cpu", enabled=dtype == "float16")
            scaler.scale((weight * 2).sum()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
        torch.testing.assert_close(weight.data, torch.full((4,), 0.9 - 0.1 * 0.01), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("of", [cuda_keys, cuda_preference_keys])
def test_updates_are_fused_where_they_can_be(of: Any, tiny_tied: Path, tmp_path: Path) -> None:
    fused = {dtype: [bool(o.get("fused")) for o in options(of(tiny_tied, dtype, tmp_path))] for dtype in DTYPES}
    assert all(all(fused[dtype]) for dtype in ("float32", "bfloat16"))
    assert not any(fused["float16"])
