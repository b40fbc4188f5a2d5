"""cuDNN's attention for long sequences only; the flag is torch's own, and there without a GPU too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from quickstart.plugin import attention


@pytest.fixture(autouse=True)
def _choice_of_before() -> Iterator[None]:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


class Model(torch.nn.Module):
    """Remembers what was chosen for each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen: list[bool] = []

    def forward(self, input_ids: torch.Tensor | None = None, inputs_embeds: torch.Tensor | None = None) -> None:
        self.chosen.append(torch.backends.cuda.cudnn_sdp_enabled())


@pytest.mark.parametrize("before", [True, False])
def test_a_users_choice_is_there_again_after_a_run(before: bool) -> None:
    torch.backends.cuda.enable_cudnn_sdp(before)
    undo = attention.without_cudnn()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    undo()
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_each_pass_chooses_for_its_own_length() -> None:
    first, second = Model(), Model()
    for model in (first, second):
        attention.choose_by_length(model)
    for length in (1, 480, 481, 512, 2048, 480):  # graphs round 481 up to 512
        first(input_ids=torch.zeros(2, length, dtype=torch.int64))
        second(input_ids=torch.zeros(1, 3, dtype=torch.int64))
    assert first.chosen == [False, False, True, True, True, False]
    assert not any(second.chosen)


def test_a_pass_without_ids_takes_no_plan() -> None:
    model = Model()
    attention.choose_by_length(model)
    torch.backends.cuda.enable_cudnn_sdp(True)
    model(inputs_embeds=torch.zeros(1, 4, 8))
    assert model.chosen == [False]


def test_the_choice_stays_for_layers_that_are_computed_again() -> None:
    model = Model()
    attention.choose_by_length(model)
    model(input_ids=torch.zeros(1, attention.CUDNN_FROM, dtype=torch.int64))
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_a_pass_without_gradients_leaves_no_plans_to_others() -> None:
    """A reward model, say, whose scores must not depend on what ran before."""
    model = Model()
    attention.choose_by_length(model)
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 600, dtype=torch.int64))
    assert model.chosen == [True]
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_a_rollout_takes_no_plans_however_long_its_prompts_are() -> None:
    model = Model()
    attention.never_plan(model)
    torch.backends.cuda.enable_cudnn_sdp(True)
    model(input_ids=torch.zeros(1, 600, dtype=torch.int64))
    assert model.chosen == [False]
