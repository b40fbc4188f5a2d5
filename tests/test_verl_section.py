"""Keys of the user's `verl:` section: which are taken, which are refused, with which word."""

from __future__ import annotations

import pytest

from quickstart import verl_compose
from quickstart.arguments import SECTIONS, field_names
from quickstart.errors import UserError
from quickstart.verl_owned import FIXED, OWNED, READ_WITHOUT_ROLLOUTS

ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(("key", "owner"), OWNED.items())
def test_a_key_that_a_setting_is_there_for_names_the_setting(key, owner):
    with pytest.raises(UserError) as caught:
        verl_compose.check_keys({key: 1})
    fault = caught.value.faults[0]
    assert fault.field == f"verl.{key}"
    assert owner in (fault.rule if owner == FIXED else fault.fix)


def test_the_settings_named_exist():
    known = {f"{section}.{name}" for section in SECTIONS for name in field_names(section)}
    assert set(OWNED.values()) - {FIXED} <= known


def test_the_keys_named_are_keys_of_verl():
    config = verl_compose._verl_defaults()
    assert [key for key in OWNED if not verl_compose.known_key(config, key)] == []
    assert [key for key in READ_WITHOUT_ROLLOUTS if not verl_compose.known_key(config, key.rstrip("."))] == []


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        (f"{ACTOR}.clip_ratio_c", "abc", "write a number"),
        (f"{ACTOR}.clip_ratio_c", True, "write a number"),
        (f"{ACTOR}.shuffle", 3, "write true or false"),
        (f"{ACTOR}.loss_agg_mode", 4, "write text"),
        ("algorithm.rollout_correction", "nope", "write keys below it"),
    ],
)
def test_a_value_of_another_kind_is_refused(key, value, fix):
    with pytest.raises(UserError, match=fix):
        verl_compose.check_keys({key: value})


def test_a_section_replaced_by_text_is_refused():
    with pytest.raises(UserError, match=r"verl\.actor_rollout_ref"):
        verl_compose.check_keys({ACTOR: "nope"})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (f"{ACTOR}.clip_ratio_c", 3),
        (f"{ACTOR}.clip_ratio_high", 0.28),
        (f"{ACTOR}.loss_agg_mode", "seq-mean-token-mean"),
        (f"{ACTOR}.optim.betas", [0.8, 0.9]),
        (f"{ACTOR}.fsdp_config.mixed_precision", {"param_dtype": "bf16"}),
        ("trainer.project_name", "mine"),
        ("trainer.logger", ["console"]),
        ("algorithm.rollout_correction.bypass_mode", True),
    ],
)
def test_what_has_no_setting_is_free(key, value):
    verl_compose.check_keys({key: value})


def test_all_faults_at_once():
    with pytest.raises(UserError) as caught:
        verl_compose.check_keys({"algorithm.gamma": 1, f"{ACTOR}.nonsense": 1, f"{ACTOR}.shuffle": "x"})
    assert len(caught.value.faults) == 3
