"""What several test modules need: the environment of a CPU run, tiny models, rows, and a switch for GPU tests.

Nothing heavy is imported before a test asks for it. Helper modules are in tests/support, which is put on the path.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SUPPORT = Path(__file__).parent / "support"
sys.path.insert(0, str(SUPPORT))

import tiny_models  # noqa: E402  (needs the path above)

CHATML = tiny_models.CHATML
make_tokenizer = tiny_models.make_tokenizer

# Read when torch, ray and verl are imported. A stray ray.get must fail in a test, not start a cluster.
os.environ.setdefault("VERL_PLATFORM", "cpu")
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def byte_tokenizer() -> Any:
    """One byte is one token; the template of one user message costs 19 more."""
    return make_tokenizer()


@pytest.fixture(scope="session")
def tiny_tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Qwen2 whose output head is its embedding."""
    return tiny_models.save_policy(tmp_path_factory.mktemp("tied"), "qwen2_tied")


@pytest.fixture(scope="session")
def tiny_untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Qwen2 with a head of its own."""
    return tiny_models.save_policy(tmp_path_factory.mktemp("untied"), "qwen2")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Llama."""
    return tiny_models.save_policy(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="session")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 rows in the parquet format that verl reads."""
    return tiny_models.save_rows(tmp_path_factory.mktemp("rows") / "sums.parquet", tiny_models.arithmetic_rows(40))


@pytest.fixture(scope="session")
def process_variables() -> None:
    """What verl's workers expect of a process that is a whole run."""
    from quickstart.trainers import environment

    environment.set_variables("cpu")
    environment.set_threads(2)


@pytest.fixture(scope="session")
def command_line() -> Iterator[Any]:
    """`python -m quickstart.run` in processes of their own that have their imports done (support/warm.py)."""
    import warm

    server = warm.Server()
    yield server
    server.close()


@pytest.fixture(scope="session")
def tiny_job(tmp_path_factory: pytest.TempPathFactory, tiny_tied: Path) -> list[str]:
    """Settings for the command line: four PPO steps of 8 sums with a tiny model, a fraction of a second each."""
    rows = tmp_path_factory.mktemp("job") / "rows.jsonl"
    lines = [json.dumps(row) for row in tiny_models.arithmetic_rows(40) if row["chosen"] != row["rejected"]]
    rows.write_text("\n".join(lines), encoding="utf-8")
    return [
        "training.device=cpu",
        f"model.model_name_or_path={tiny_tied}",
        f"data.train_file={rows}",
        "data.max_response_length=8",
        "rl.rollout_batch_size=8",
        "rl.per_device_train_batch_size=8",
        "training.max_steps=4",
        "training.num_threads=1",
    ]
