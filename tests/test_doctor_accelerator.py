"""torch and driver, GPU, flash-attn, vllm, plugin: invented facts; and child processes that crash, hang or babble."""

from __future__ import annotations

from typing import Any

import pytest

from quickstart import config
from quickstart.arguments import RunConfig
from quickstart.config import Gpu, Probe
from quickstart.doctor import accelerator as a
from quickstart.doctor.children import Answer, Child

CUDA_BUILD = a.TorchBuild(version="2.11.0+cu130", cuda="13.0")
CPU_BUILD = a.TorchBuild(version="2.13.0+cpu", cuda=None)
OLD = Gpu(name="Tesla T4", memory_bytes=16 * 2**30, capability=(7, 5))
NEW = Gpu(name="RTX 3090", memory_bytes=24 * 2**30, capability=(8, 6))


def settings(section: str = "model", **values: Any) -> RunConfig:
    return config.from_arguments(**{f"{section}_args": values})


@pytest.mark.parametrize(
    ("build", "driver", "device", "state", "words"),
    [
        (CPU_BUILD, None, "cpu", "ok", "2.13.0+cpu"),
        (CUDA_BUILD, (13, 0), "cuda", "ok", "CUDA 13.0"),
        (CUDA_BUILD, (13, 2), "cpu", "ok", "unused"),
        (CUDA_BUILD, (12, 8), "cuda", "error", "driver for CUDA 12.8"),
        (CUDA_BUILD, None, "cuda", "error", "no CUDA driver"),
        (CPU_BUILD, (12, 8), "cuda", "error", "without CUDA"),
        (None, None, "cpu", "error", "not installed"),
    ],
)
def test_torch_against_the_driver(
    build: a.TorchBuild | None, driver: tuple[int, int] | None, device: str, state: str, words: str
) -> None:
    found = a.judge_torch(build, driver, device)
    assert found.state == state
    assert words in found.text
    assert state == "ok" or found.fix


def test_the_installed_build_is_read_without_importing_torch() -> None:
    build = a.torch_build()
    assert build is not None
    assert build.version[0].isdigit()


def test_a_gpu_that_torch_cannot_use_is_not_passed_over() -> None:
    (found,) = a.judge_idle_gpu(CPU_BUILD, (12, 8), Probe(why_no_gpu="built without CUDA"), "cpu")
    assert found.state == "warning"
    (found,) = a.judge_idle_gpu(CUDA_BUILD, (13, 0), Probe(gpus=(NEW,)), "cpu")
    assert (found.state, "RTX 3090" in found.found, "training.device" in found.fix) == ("note", True, True)
    assert a.judge_idle_gpu(CPU_BUILD, None, Probe(), "cpu") == []


def test_before_ampere_the_settings_that_follow_are_named() -> None:
    (found,) = a.judge_gpu((OLD,), settings())
    assert found.state == "note"
    for word in ("Tesla T4", "7.5", "float16", "sdpa", "eager"):
        assert word in found.found
    assert a.judge_gpu((NEW, NEW), settings())[0].state == "ok"


def test_before_ampere_flash_attention_is_refused_and_bfloat16_is_slow() -> None:
    cfg = settings(torch_dtype="bfloat16", use_flash_attention_2=True)
    _, slow, refused = a.judge_gpu((OLD,), cfg)
    assert (slow.state, slow.field, slow.found) == ("warning", "model.torch_dtype", "bfloat16")
    assert (refused.state, refused.field, refused.found) == ("error", "model.use_flash_attention_2", "true")
    assert "8.0" in refused.rule


def test_a_kernel_that_fails_says_how_far_it_got() -> None:
    answer = Answer(facts={"float32": "ok"}, failure="CUDA error: no kernel image is available")
    found = a.judge_kernel(answer)
    assert found.state == "error"
    assert "no kernel image" in found.found
    assert "float32" in found.found
    assert a.judge_kernel(Answer(facts={"float32": "ok", "device": "x"})).state == "ok"


def test_collectives() -> None:
    one = Answer(facts={"torch": "2", "gloo": True, "nccl": False})
    assert a.judge_collectives(one, 1).state == "ok"
    found = a.judge_collectives(one, 2)
    assert (found.state, found.field, "NCCL" in found.rule) == ("error", "training.num_devices", True)
    broken = a.judge_collectives(Answer(failure="ImportError: libcudart.so.13"), 1)
    assert (broken.state, broken.check, "libcudart" in broken.found) == ("error", "torch import", True)


@pytest.mark.parametrize(
    ("facts", "failure", "state", "words"),
    [
        ({"verl": "0.9.1", "plugin": "registered"}, "", "ok", "0.9.1"),
        ({}, "ModuleNotFoundError: No module named 'transfer_queue'", "error", "transfer_queue"),
        ({"verl": "0.9.1", "plugin": "no entry point"}, "", "error", "pip install -e ."),
        ({"verl": "0.9.1"}, "ImportError: cannot import PlatformBase", "error", "PlatformBase"),
        ({"verl": "0.9.1", "plugin": "not loaded by verl"}, "", "error", "VERL_USE_EXTERNAL_PLUGINS"),
    ],
)
def test_the_plugin_in_verl(facts: dict[str, Any], failure: str, state: str, words: str) -> None:
    found = a.judge_plugin(Answer(facts=facts, failure=failure))
    assert found.state == state
    assert words in found.text + found.fix


def test_flash_attention_is_optional_until_asked_for() -> None:
    plain, asked = settings(), settings(use_flash_attention_2=True)
    assert a.judge_flash(None, None, "2.11.0", plain).state == "ok"
    found = a.judge_flash(None, None, "2.11.0", asked)
    assert (found.state, found.field) == ("error", "model.use_flash_attention_2")
    broken = Answer(failure="ImportError: undefined symbol: _ZN3c105ErrorC2E")
    found = a.judge_flash("2.8.3", broken, "2.13.0", plain)
    assert (found.state, "undefined symbol" in found.found, "2.13.0" in found.found) == ("warning", True, True)
    assert a.judge_flash("2.8.3", broken, "2.13.0", asked).state == "error"
    assert "packed" in a.judge_flash("2.8.3", Answer(), "2.11.0", asked).found


def test_vllm_that_does_not_import() -> None:
    broken = a.judge_vllm_import(Answer(failure="ImportError: libcudart.so.13: cannot open shared object file"))
    assert (broken.state, broken.field, "libcudart" in broken.found) == ("error", "rl.rollout_engine", True)
    assert a.judge_vllm_import(Answer(facts={"vllm": "0.24.0"}, seconds=9.8)).found == "0.24.0 (9.8 s)"


def test_vllm_and_the_torch_it_was_built_for() -> None:
    hf, vllm = settings("rl"), settings("rl", rollout_engine="vllm")
    assert a.judge_vllm(None, None, CPU_BUILD, hf).state == "ok"
    assert a.judge_vllm(None, None, CPU_BUILD, vllm).field == "rl.rollout_engine"
    assert a.judge_vllm("0.24.0", "==2.11.0", CUDA_BUILD, vllm).state == "ok"
    assert a.judge_vllm("0.24.0", "==2.11.0", CPU_BUILD, hf).state == "note"
    found = a.judge_vllm("0.24.0", "==2.11.0", CPU_BUILD, vllm)
    assert (found.state, "==2.11.0" in found.found, "2.13.0" in found.found) == ("error", True, True)


# ---- children ----


def test_a_child_that_crashes_keeps_what_it_said() -> None:
    code = "import os; print('noise'); print('{\"a\": 1}', flush=True); os.kill(os.getpid(), 11)"
    answer = Child(code, timeout=20).answer()
    assert answer.facts == {"a": 1}
    assert answer.failure == "ended by signal SIGSEGV"


def test_a_child_that_raises_gives_its_last_line() -> None:
    answer = Child("raise ImportError('undefined symbol: x')", timeout=20).answer()
    assert answer.failure == "ImportError: undefined symbol: x"


def test_a_child_that_hangs_is_ended() -> None:
    answer = Child("print('{\"a\": 1}', flush=True); import time; time.sleep(600)", timeout=3).answer()
    assert answer.facts == {"a": 1}
    assert answer.failure == "no end after 3 s"
    assert answer.seconds < 30
