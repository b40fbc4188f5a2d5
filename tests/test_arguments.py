"""The settings themselves: names, defaults, and that verl's own lists have not moved away from ours."""

import dataclasses
import typing

import pytest

from quickstart import arguments
from quickstart.arguments import ESTIMATORS, GROUP_TYPES, PREFERENCE_TYPES, RL_TYPES, SECTIONS, RLArguments


def every_field():
    return [(section, field) for section, kind in SECTIONS.items() for field in dataclasses.fields(kind)]


@pytest.mark.parametrize(("section", "field"), every_field(), ids=lambda x: x if isinstance(x, str) else x.name)
def test_every_setting_says_what_it_does(section, field):
    assert len(field.metadata["doc"]) > 10


def test_rl_types_are_exactly_the_choices_of_the_field():
    assert typing.get_args(arguments.RLType) == RL_TYPES


def test_used_by_names_only_rl_types_that_exist():
    for _, field in every_field():
        assert set(field.metadata["used_by"]) <= set(RL_TYPES), field.name


def test_estimators_are_all_that_verl_registers():
    """Contract: a verl that adds, drops or renames an estimator must be looked at."""
    core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
    assert set(ESTIMATORS.values()) == {member.value for member in core_algos.AdvantageEstimator}
    assert set(ESTIMATORS.values()) == set(core_algos.ADV_ESTIMATOR_REGISTRY)


def test_kl_estimators_are_those_that_verl_computes():
    core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
    import torch

    for name in typing.get_args(arguments.KLEstimator):
        if name != "auto":
            core_algos.kl_penalty_forward(torch.zeros(1), torch.zeros(1), name)
    with pytest.raises(NotImplementedError):
        core_algos.kl_penalty_forward(torch.zeros(1), torch.zeros(1), "full")


def test_group_types_and_preference_types_do_not_overlap():
    assert not set(GROUP_TYPES) & set(PREFERENCE_TYPES)
    assert "ppo" not in GROUP_TYPES
    assert "grpo" in GROUP_TYPES


def test_arguments_are_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RLArguments().learning_rate = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        RLArguments("ppo")  # type: ignore[misc]


def test_mutable_defaults_are_not_shared():
    first, second = arguments.DataArguments(), arguments.DataArguments()
    assert first.columns is not second.columns


@pytest.mark.parametrize(
    ("rl_type", "name"), [("ppo", "PPO"), ("grpo", "GRPO"), ("reinforce_plus_plus", "REINFORCE++"), ("dpo", "DPO")]
)
def test_algorithm_is_named_in_capitals(rl_type, name):
    assert arguments.algorithm_name(rl_type) == name
