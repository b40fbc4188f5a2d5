"""Reading settings: order of layers, types, all faults at once, paths, profiles, overrides."""

import contextlib
import dataclasses
import glob
import math
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quickstart import config
from quickstart.arguments import GROUP_TYPES, PREFERENCE_TYPES, RL_TYPES, ModelArguments, RLArguments, TrainingArguments
from quickstart.config import build, casting, names, paths, profile, rules
from quickstart.config.overrides import parse_override, parse_overrides
from quickstart.config.profile import Gpu, Probe
from quickstart.errors import Fault, UserError

REPOSITORY = Path(__file__).resolve().parents[1]
CPU = Probe(why_no_gpu="no CUDA driver on this machine", cpus=2)
H200 = Gpu(name="NVIDIA H200", memory_bytes=140 * 2**30, capability=(9, 0))
WITH_VLLM = Probe(gpus=(H200,), has_vllm=True)
T4 = Gpu(name="Tesla T4", memory_bytes=15 * 2**30, capability=(7, 5))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder with data and a model folder, as the current one; no profile detection."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "tiny").mkdir()
    return tmp_path


def write(folder, text, name="c.yaml"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


BASE = "model: {model_name_or_path: tiny}\ndata: {train_file: train.jsonl}\n"


def load(here, text="", *overrides):
    return config.load(write(here, BASE + text), list(overrides))


def faults_of(call, *arguments):
    with pytest.raises(UserError) as caught:
        call(*arguments)
    return caught.value.faults


def only_fault(call, *arguments):
    faults = faults_of(call, *arguments)
    assert len(faults) == 1, [f.render() for f in faults]
    return faults[0]


class TestShippedConfigs:
    @pytest.mark.parametrize("path", sorted(glob.glob(str(REPOSITORY / "configs" / "*.y*ml"))), ids=os.path.basename)
    @pytest.mark.parametrize("chosen", ["cpu", "gpu"])
    @pytest.mark.parametrize("rl_type", ["ppo", "grpo", "dpo", "kto", "rloo"])
    def test_parses_with_every_profile_and_algorithm(self, path, chosen, rl_type, here):
        cfg = config.load(path, [f"profile={chosen}", f"rl.rl_type={rl_type}", *LOCAL])
        assert cfg.rl.rl_type == rl_type
        assert cfg.source.profile == chosen

    def test_ppo_min_is_complete_for_the_rows_of_the_article(self):
        text = (REPOSITORY / "configs" / "ppo_min.yaml").read_text()
        wanted = """model_name_or_path use_flash_attention_2 torch_dtype reward_model_name_or_path
            reward_use_flash_attention_2 train_file max_prompt_length max_response_length rl_type num_train_epochs
            per_device_train_batch_size gradient_accumulation_steps learning_rate ppo_clip_ratio kl_coef actor_offload
            critic_offload reward_offload output_dir logging_steps seed max_steps temperature top_p num_generations
            reward kl_placement kl_controller lora_rank backend device save_steps eval_steps"""
        assert [name for name in wanted.split() if f" {name}:" not in text] == []

    def test_is_found_from_another_folder(self, here, monkeypatch):
        cfg = config.load("configs/ppo_min.yaml", LOCAL)
        assert cfg.source.config_path == str(REPOSITORY / "configs" / "ppo_min.yaml")


STAND_IN_DRIVER = """
#include <string.h>
#include <stddef.h>
int cuInit(unsigned flags) { return STATUS; }
int cuDeviceGetCount(int *count) { *count = COUNT; return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDeviceGetName(char *name, int length, int device) { strncpy(name, "Stand-in GPU", length); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)24 << 30; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? 8 : attribute == 76 ? 9 : -1; return 0; }
"""
STAND_IN_UUID = """
int cuDeviceGetUuid(unsigned char *uuid, int device) { for (int i = 0; i < 16; i++) uuid[i] = 16 + i; return 0; }
"""
STAND_IN_NVML = """
#include <string.h>
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
static int device;
int nvmlInit_v2(void) { return STATUS; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    *handle = &device; return strcmp(uuid, "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f"); }
int nvmlDeviceGetMemoryInfo(void *handle, nvmlMemory_t *memory) {
    memory->total = 24ull << 30; memory->free = 3ull << 30; memory->used = 21ull << 30; return handle != &device; }
"""
LOCAL = ["data.train_file=train.jsonl", "model.model_name_or_path=tiny"]


class TestOrderOfLayers:
    TEXT = "rl: {learning_rate: 1e-5, ppo_epochs: 2}\nprofile: cpu\nprofiles: {cpu: {rl: {ppo_epochs: 3}}, gpu: {}}\n"

    def test_default_stands_where_nothing_is_said(self, here):
        assert load(here).rl.learning_rate == RLArguments().learning_rate

    def test_file_goes_before_default(self, here):
        assert load(here, self.TEXT).rl.learning_rate == 1e-5

    def test_profile_goes_before_file(self, here):
        assert load(here, self.TEXT).rl.ppo_epochs == 3
        assert load(here, self.TEXT, "profile=gpu").rl.ppo_epochs == 2

    def test_command_line_goes_before_profile(self, here):
        assert load(here, self.TEXT, "rl.ppo_epochs=4").rl.ppo_epochs == 4

    def test_last_of_two_overrides_wins(self, here):
        assert load(here, "", "rl.ppo_epochs=4", "rl.ppo_epochs=5").rl.ppo_epochs == 5

    def test_mappings_are_merged_key_by_key(self, here):
        cfg = load(here, "", "data.columns.prompt=question", "data.columns.chosen=good")
        assert cfg.data.columns == {"prompt": "question", "chosen": "good"}

    def test_source_remembers_who_said_what(self, here):
        cfg = load(here, self.TEXT, "rl.ppo_epochs=4")
        assert cfg.source.profile == "cpu"
        assert cfg.source.overrides == ("rl.ppo_epochs=4",)
        assert {"rl.ppo_epochs", "rl.learning_rate"} <= cfg.source.given
        assert "rl.gamma" not in cfg.source.given


class TestNumbers:
    @pytest.mark.parametrize("text", ["1e-6", "'1e-6'", "1.0e-6", "0.000001", "1E-06"])
    def test_ways_to_write_a_small_number(self, here, text):
        assert load(here, f"rl: {{learning_rate: {text}}}").rl.learning_rate == pytest.approx(1e-6)
        assert load(here, "", f"rl.learning_rate={text}").rl.learning_rate == pytest.approx(1e-6)

    @pytest.mark.parametrize("text", ["10%", "'10 %'", "0.1", ".1", "1e-1"])
    def test_a_ratio_may_be_a_percentage(self, here, text):
        assert load(here, f"rl: {{warmup_ratio: {text}}}").rl.warmup_ratio == pytest.approx(0.1)

    def test_a_learning_rate_is_no_percentage(self, here):
        fault = only_fault(load, here, "", "rl.learning_rate=1%")
        assert "no ratio" in fault.fix

    @pytest.mark.parametrize(("text", "value"), [("1_000", 1000), ("1e3", 1000), ("8.0", 8), ("'8'", 8), ("+8", 8)])
    def test_whole_numbers(self, here, text, value):
        assert load(here, f"training: {{max_steps: {text}}}").training.max_steps == value
        assert load(here, "", f"training.max_steps={text}").training.max_steps == value

    @pytest.mark.parametrize("text", ["8.5", "true", "eight", "[8]", "1,000", "0x10", "8 steps", "''", "1__0", "١٢"])
    def test_what_is_no_whole_number(self, here, text):
        fault = only_fault(load, here, f"training:\n  max_steps: {text}\n")
        assert "training.max_steps" in fault.field
        assert "whole number" in fault.rule + fault.fix

    @pytest.mark.parametrize("text", [".nan", ".inf", "-.inf", "nan", "inf", "1e999"])
    def test_what_is_not_finite_is_refused(self, here, text):
        assert only_fault(load, here, f"rl: {{learning_rate: {text}}}").field.startswith("rl.learning_rate")

    def test_thousands_with_commas_get_the_right_hint(self, here):
        assert only_fault(load, here, "", "training.max_steps=1,000").fix == "write 1000"

    @given(st.floats(min_value=1e-300, max_value=1.0, exclude_min=True))
    def test_any_float_survives_as_text(self, number):
        assert casting.cast(repr(number), float) == number

    @given(st.integers(min_value=-(10**15), max_value=10**15))
    def test_any_int_survives_as_text(self, number):
        assert casting.cast(str(number), int) == number
        assert casting.cast(f"{number:_}", int) == number

    @given(st.one_of(st.text(), st.none(), st.booleans(), st.floats(), st.lists(st.integers()), st.binary()))
    def test_no_value_breaks_the_casting(self, value):
        for section in build.SECTIONS:
            for kind in build.kinds(section).values():
                result = casting.cast(value, kind)
                if isinstance(result, float):
                    assert math.isfinite(result)


class TestTruthAndNull:
    @pytest.mark.parametrize("text", ["true", "True", "'true'", "yes", "on"])
    def test_words_for_true(self, here, text):
        assert load(here, f"rl: {{rl_type: dpo, reference_free: {text}}}\n").rl.reference_free is True
        assert load(here, "", f"data.shuffle={text}").data.shuffle is True

    @pytest.mark.parametrize("text", ["false", "False", "no", "off"])
    def test_words_for_false(self, here, text):
        assert load(here, "", f"data.shuffle={text}").data.shuffle is False

    @pytest.mark.parametrize("text", ["1", "0", "maybe", "null", "[true]"])
    def test_everything_else_is_no_truth(self, here, text):
        assert only_fault(load, here, "", f"data.shuffle={text}").field.startswith("data.shuffle")

    @pytest.mark.parametrize("text", ["null", "~", "None", "none"])
    def test_null_where_it_means_something(self, here, text):
        assert load(here, "", f"training.max_steps={text}").training.max_steps is None

    def test_null_elsewhere_is_refused(self, here):
        fault = only_fault(load, here, "rl: {learning_rate: null}")
        assert "not empty" in fault.rule

    def test_a_key_without_a_value_is_null(self, here):
        assert load(here, "training:\n  max_steps:\n").training.max_steps is None
        assert "not empty" in only_fault(load, here, "training:\n  seed:\n").rule

    def test_an_empty_section_is_fine(self, here):
        assert load(here, "rl:\n").rl == RLArguments()


class TestUnions:
    def test_auto_or_a_number(self, here):
        assert load(here, "", "rl.num_generations=auto").rl.num_generations == "auto"
        assert load(here, "", "rl.num_generations=2").rl.num_generations == 2
        assert "auto" in only_fault(load, here, "", "rl.num_generations=atuo").fix

    def test_end_never_or_a_number(self, here):
        assert load(here, "", "training.save_steps=never").training.save_steps == "never"
        assert load(here, "", "training.save_steps=5").training.save_steps == 5
        assert only_fault(load, here, "", "training.save_steps=0").rule == "must be at least 1"

    def test_auto_or_truth(self, here):
        assert load(here, "", "model.gradient_checkpointing=true").model.gradient_checkpointing is True
        assert load(here, "", "model.gradient_checkpointing=AUTO").model.gradient_checkpointing == "auto"

    def test_one_file_or_several(self, here):
        (here / "b.jsonl").write_text("{}\n")
        assert load(here, "", "data.train_file=[train.jsonl, b.jsonl]").data.train_file == ["train.jsonl", "b.jsonl"]
        assert "no such file" in only_fault(load, here, "", "data.train_file=[train.jsonl, x.jsonl]").rule

    def test_choices_ignore_case_and_name_the_nearest(self, here):
        assert load(here, "", "rl.rl_type=GRPO").rl.rl_type == "grpo"
        assert only_fault(load, here, "", "rl.rl_type=grppo").fix == "write grpo"


class TestFaults:
    def test_all_of_them_come_at_once_with_their_lines(self, here):
        text = "rl:\n  lr: 1\n  learning_rate: -1\n  temperature: 0\ntrainning: {}\n"
        faults = faults_of(load, here, text, "training.seed=x", "rl.top_p=2", "wat")
        rendered = UserError(faults).render()
        assert len(faults) == 7
        for part in (
            "c.yaml:4",
            "c.yaml:5",
            "c.yaml:6",
            "c.yaml:7",
            "rl.learning_rate",
            "training",
            "wat",
            "command line",
        ):
            assert part in rendered, part

    @pytest.mark.parametrize(
        ("key", "fix"),
        [
            ("rl.lr", "rl.learning_rate"),
            ("rl.epochs", "rl.num_train_epochs"),
            ("rl.batch_size", "rl.rollout_batch_size"),
            ("rl.ppo_micro_batch_size_per_gpu", "rl.per_device_train_batch_size"),
            ("rl.adv_estimator", "rl.rl_type"),
            ("rl.learning_rat", "rl.learning_rate"),
            ("model.learning_rate", "rl.learning_rate"),
            ("training.total_epochs", "rl.num_train_epochs"),
            ("data.train_files", "data.train_file"),
            ("rl.lr_warmup_steps_ratio", "rl.warmup_ratio"),
            ("model.path.x", "remove it"),
        ],
    )
    def test_an_unknown_key_names_the_real_one(self, here, key, fix):
        assert fix in only_fault(load, here, "", f"{key}=1").fix

    def test_every_alias_points_to_a_key_that_exists(self):
        assert set(names.ALIASES.values()) <= set(names.all_keys())
        for alias in names.ALIASES:
            homes = names.homes(alias)
            assert not homes, f"{alias} is a real name: {homes}"

    @pytest.mark.parametrize("key", ["actor_rollout_ref", "algorithm", "trainer"])
    def test_verl_groups_at_the_top_are_sent_below_verl(self, here, key):
        assert f"verl.{key}" in only_fault(load, here, f"{key}: {{a: 1}}\n").fix
        assert f"verl.{key}.a=1" in only_fault(load, here, "", f"{key}.a=1").fix

    @pytest.mark.parametrize(
        "text", ["verl: {reward_model: {enable: true}}", "verl: {custom_reward_function.path: r.py}"]
    )
    def test_old_verl_keys_that_are_ignored_are_refused_with_the_new_one(self, here, text):
        fault = only_fault(load, here, text)
        assert "ignores" in fault.rule
        assert "rl.reward=" in fault.fix

    def test_ignored_verl_keys_on_the_command_line_too(self, here):
        assert "rl.reward=function" in only_fault(load, here, "", "verl.custom_reward_function.path=r.py").fix

    @pytest.mark.parametrize(
        ("setting", "part"),
        [
            ("rl.temperature=0", "nothing is learned"),
            ("rl.temperature=-1", "above 0"),
            ("rl.top_p=0", "above 0"),
            ("rl.top_p=1.5", "at most 1"),
            ("rl.top_k=0", "no token"),
            ("rl.top_k=1", "equal"),
            ("rl.kl_coef=-0.1", "at least 0"),
            ("rl.learning_rate=0", "above 0"),
            ("rl.learning_rate=2", "at most 1"),
            ("rl.warmup_ratio=1", "below 1"),
            ("rl.ppo_clip_ratio=20", "write 0.2"),
            ("rl.rollout_batch_size=0", "at least 1"),
            ("data.max_prompt_length=0", "at least 1"),
            ("data.max_response_length=-1", "at least 1"),
            ("training.logging_steps=0", "at least 1"),
            ("training.seed=-1", "at least 0"),
            ("model.lora_rank=-1", "at least 0"),
            ("rl.reward=prefrence", "preference"),
            ("rl.reward=function:r.py", "function:FILE.py:NAME"),
            ("rl.reward=function:nothere.py:score", "no such file"),
            ("rl.reward=model", "reward_model_name_or_path"),
            ("rl.rl_type=remax", "greedy"),
            ("rl.rl_type=gdpo", "one reward an answer"),
            ("rl.rl_type=optimal_token_baseline", "sum_pi_squared"),
            ("training.eval_steps=5", "eval_file"),
        ],
    )
    def test_values_that_run_but_are_wrong(self, here, setting, part):
        assert part in only_fault(load, here, "", setting).render()

    def test_a_wrong_value_does_not_set_off_rules_about_it(self, here):
        assert len(faults_of(load, here, "", "rl.per_device_train_batch_size=0", "rl.rollout_batch_size=7")) == 1


class TestCrossFieldRules:
    def settings(self, here, *overrides):
        return load(here, "", *overrides)

    @pytest.mark.parametrize("rl_type", [t for t in GROUP_TYPES if t not in rules.NOT_IN_V1])
    def test_group_methods_need_groups(self, here, rl_type):
        fault = only_fault(load, here, "", f"rl.rl_type={rl_type}", "rl.num_generations=1")
        assert "raw reward" in fault.rule
        assert config.generations(load(here, "", f"rl.rl_type={rl_type}")) == 4

    @pytest.mark.parametrize("rl_type", [t for t in RL_TYPES if t not in rules.NOT_IN_V1])
    def test_every_algorithm_has_legal_defaults(self, here, rl_type):
        assert config.resolve(load(here, "", f"rl.rl_type={rl_type}"), CPU).cfg.rl.rl_type == rl_type

    def test_kto_needs_two_rows_at_a_time(self, here):
        assert "KL" in only_fault(load, here, "", "rl.rl_type=kto", "rl.per_device_train_batch_size=1").rule

    @pytest.mark.parametrize("beta", ["0", "-0.1"])
    def test_beta_must_be_positive(self, here, beta):
        assert "nothing is learned" in only_fault(load, here, "", "rl.rl_type=dpo", f"rl.beta={beta}").rule

    def test_beta_as_text_is_a_number(self, here):
        assert load(here, "rl: {rl_type: dpo, beta: '0.1'}").rl.beta == 0.1

    @pytest.mark.parametrize("value", ["0.5", "-0.1", "50%"])
    def test_label_smoothing_stays_below_a_half(self, here, value):
        assert only_fault(load, here, "", "rl.rl_type=dpo", f"rl.label_smoothing={value}")

    def test_adaptive_kl_only_in_the_reward(self, here):
        adaptive = "rl.kl_controller=adaptive"
        assert load(here, "", adaptive).rl.kl_controller == "adaptive"
        assert "loss" in only_fault(load, here, "", adaptive, "rl.rl_type=grpo").rule
        assert load(here, "", adaptive, "rl.rl_type=grpo", "rl.kl_placement=reward")

    def test_warm_up_that_makes_the_run_a_no_op(self, here):
        assert only_fault(load, here, "", "rl.warmup_ratio=0.5", "training.max_steps=2")
        assert load(here, "", "rl.warmup_ratio=0.5", "training.max_steps=10")

    def test_local_backend_is_one_device(self, here):
        assert only_fault(
            load, here, "", "training.backend=local", "training.num_devices=2", "rl.rollout_batch_size=16"
        )

    @pytest.mark.parametrize(
        "settings",
        [
            {"rollout_batch_size": 20, "per_device_train_batch_size": 3},
            {"rollout_batch_size": 20, "per_device_train_batch_size": 64},
            {"rollout_batch_size": 7, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
            {"rl_type": "grpo", "num_generations": 4, "rollout_batch_size": 6, "per_device_train_batch_size": 6},
            {"rl_type": "grpo", "num_generations": 3, "rollout_batch_size": 5, "per_device_train_batch_size": 5},
            {"rl_type": "grpo", "num_generations": 8, "rollout_batch_size": 4, "per_device_train_batch_size": 4},
        ],
    )
    def test_batch_sizes_that_do_not_divide_get_settings_that_do(self, here, settings):
        """Each way out that a message offers is legal when it is taken."""
        typed = [f"rl.{name}={value}" for name, value in settings.items()]
        fault = only_fault(load, here, "", *typed)
        ways = fault.fix.removeprefix("set ").split(", or ")
        assert ways
        for way in ways:
            assert load(here, "", *typed, *way.split())

    @given(
        prompts=st.integers(1, 60), answers=st.integers(1, 8), micro=st.integers(1, 20), accumulation=st.integers(1, 6)
    )
    def test_batch_rules_allow_exactly_what_verl_can_split(self, prompts, answers, micro, accumulation):
        """verl: mini batch in prompts (update / n) is whole, and divides the prompts of a step."""
        cfg = make(
            rollout_batch_size=prompts,
            num_generations=answers,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=accumulation,
        )
        update = micro * accumulation
        legal = update % answers == 0 and prompts % (update // answers) == 0 if update >= answers else False
        broken = [fault for fault, _ in rules.check_rules(cfg)]
        assert (not broken) == legal
        for fault in broken:
            for way in fault.fix.removeprefix("set ").split(", or "):
                changes = dict(part.removeprefix("rl.").split("=") for part in way.split())
                fixed = make(**{**vars(cfg.rl), **{name: int(value) for name, value in changes.items()}})
                assert rules.check_rules(fixed) == []

    def test_a_setting_that_the_method_does_not_read_is_mentioned(self, here):
        notices = load(here, "", "rl.beta=0.3", "rl.dpo_loss=ipo").source.notices
        assert notices == ("PPO does not read: rl.beta, rl.dpo_loss",)
        assert load(here, "", "rl.gamma=0.9").source.notices == ()
        assert "rl.gamma" in load(here, "", "rl.rl_type=dpo", "rl.gamma=0.9").source.notices[0]

    @pytest.mark.parametrize("rl_type", RL_TYPES)
    @pytest.mark.parametrize("profile", ["cpu", "gpu"])
    def test_what_comes_with_the_shipped_config_is_not(self, rl_type, profile):
        if rl_type in rules.NOT_IN_V1:
            return
        notices = config.load(None, [f"rl.rl_type={rl_type}", f"profile={profile}"]).source.notices
        assert [notice for notice in notices if "does not read" in notice] == []

    @pytest.mark.parametrize(
        ("setting", "condition", "with_it"),
        [
            ("model.lora_alpha=8", "model.lora_rank above 0", "model.lora_rank=4"),
            ("model.reward_model_name_or_path=tiny", "rl.reward=model", "rl.reward=model"),
            ("rl.reward_offload=cpu", "rl.reward=model", ""),
            ("rl.kl_target=0.2", "rl.kl_controller=adaptive", "rl.kl_controller=adaptive"),
            ("rl.kl_horizon=9", "rl.kl_controller=adaptive", "rl.kl_controller=adaptive"),
        ],
    )
    def test_a_setting_that_another_one_switches_off_is(self, here, setting, condition, with_it):
        notice = f"{setting.partition('=')[0]} is read only with {condition}"
        assert notice in load(here, "", setting).source.notices
        if with_it:
            assert notice not in load(here, "", setting, with_it).source.notices

    def test_a_setting_that_was_given_twice_is(self, here):
        notices = load(here, "", "rl.gamma=0.9", "rl.lam=0.9", "rl.gamma=0.8").source.notices
        assert notices == ("rl.gamma was given 2 times; the last one counts: 0.8",)

    def test_a_value_that_was_typed_is_even_where_it_is_the_shipped_one(self, here):
        typed = ["rl.rl_type=dpo", "profile=cpu", "rl.critic_learning_rate=1e-3", "rl.top_p=1.0"]
        assert "DPO does not read: rl.critic_learning_rate, rl.top_p" in config.load(None, typed).source.notices
        other = load(here, "rl: {rl_type: dpo, critic_learning_rate: 0.01}")
        assert other.source.notices == ("DPO does not read: rl.critic_learning_rate",)

    def test_a_key_of_verl_that_is_not_read_without_rollouts(self, here):
        optimizer, clip = (
            "verl.actor_rollout_ref.actor.optim.betas=[0.8,0.9]",
            "verl.actor_rollout_ref.actor.clip_ratio_c=4",
        )
        for rl_type in ("dpo", "kto", "simpo", "orpo"):
            notices = load(
                here, "", f"rl.rl_type={rl_type}", optimizer, clip, "verl.algorithm.gdpo_reward_keys=a"
            ).source.notices
            unread = "verl.actor_rollout_ref.actor.clip_ratio_c, verl.algorithm.gdpo_reward_keys"
            assert notices == (f"{rl_type.upper()} does not read: {unread}",)
        assert load(here, "", "rl.rl_type=grpo", clip).source.notices == ()


def make(**rl):
    from quickstart.arguments import RunConfig

    return RunConfig(rl=RLArguments(**rl))


class TestSteps:
    def test_steps_follow_from_rows(self):
        assert config.check_steps(make(rollout_batch_size=20, num_train_epochs=2), 100) == 10
        assert config.check_steps(make(rl_type="dpo", per_device_train_batch_size=4), 10) == 2

    def test_max_steps_goes_first(self):
        cfg = dataclasses.replace(make(), training=TrainingArguments(max_steps=3))
        assert config.check_steps(cfg, 100) == 3

    def test_fewer_rows_than_a_step_needs(self):
        fault = only_fault(config.check_steps, make(rollout_batch_size=8), 3)
        sizes = "rl.per_device_train_batch_size=3 rl.gradient_accumulation_steps=1"
        assert fault.fix == f"set rl.rollout_batch_size=3 {sizes}, or add data"
        fault = only_fault(config.check_steps, make(rollout_batch_size=8, per_device_train_batch_size=2), 7)
        assert fault.fix == "write 6, or add data"


class TestFile:
    def test_missing_file_names_the_nearest(self, here):
        write(here, BASE, "mine.yaml")
        assert "mine.yaml" in only_fault(config.load, "mime.yaml", []).fix

    def test_a_folder_is_no_file(self, here):
        assert "folder" in only_fault(config.load, str(here), []).found

    @pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n"])
    def test_empty_file(self, here, text):
        assert "no settings" in only_fault(config.load, write(here, text), []).found

    @pytest.mark.parametrize("text", ["- a\n- b\n", "hello", "42"])
    def test_not_a_mapping(self, here, text):
        assert "mapping" in only_fault(config.load, write(here, text), []).rule

    def test_syntax_error_has_its_line(self, here):
        fault = only_fault(config.load, write(here, "rl:\n  rl_type: ppo\n bad: [1\n"), [])
        assert fault.field.endswith(("c.yaml:3", "c.yaml:4"))
        assert "not valid YAML" in fault.rule

    def test_tabs_are_explained(self, here):
        assert "tabs" in only_fault(config.load, write(here, "rl:\n\trl_type: ppo\n"), []).fix

    def test_duplicate_keys_have_both_lines(self, here):
        fault = only_fault(config.load, write(here, "rl:\n  seed: 1\n  rl_type: ppo\n  seed: 2\n"), [])
        assert "first in line 2" in fault.found
        assert fault.field.endswith(":4")

    def test_not_utf8_has_its_line(self, here):
        fault = only_fault(config.load, write(here, "# ok\n# 你好\n".encode("gb18030") + BASE.encode()), [])
        assert fault.field.endswith(":2")
        assert "UTF-8" in fault.rule

    def test_byte_order_mark_and_windows_line_ends(self, here):
        text = ("\ufeff" + BASE.replace("\n", "\r\n")).encode()
        assert config.load(write(here, text), []).model.model_name_or_path == "tiny"

    def test_code_in_yaml_is_not_run(self, here):
        fault = only_fault(config.load, write(here, "rl: !!python/object/apply:os.system ['touch pwned']\n"), [])
        assert "not valid YAML" in fault.rule
        assert not (here / "pwned").exists()

    def test_two_documents_in_one_file(self, here):
        assert "not valid YAML" in only_fault(config.load, write(here, "rl: {}\n---\nrl: {}\n"), []).rule

    def test_an_anchor_that_contains_itself_ends(self, here):
        faults_of(config.load, write(here, "rl: &a\n  x: *a\n"), [])

    def test_anchors_and_merge_keys_work(self, here):
        text = BASE + "rl: &base {gamma: 0.9}\nprofile: p\nprofiles: {p: {rl: {<<: *base, lam: 0.8}}}\n"
        cfg = config.load(write(here, text), [])
        assert (cfg.rl.gamma, cfg.rl.lam) == (0.9, 0.8)

    def test_a_section_that_is_no_mapping(self, here):
        assert "section holds settings" in only_fault(load, here, "rl: 3\n").rule

    def test_a_section_that_is_an_odd_key(self, here):
        assert only_fault(load, here, "3: {a: 1}\n")

    @given(st.binary(max_size=200))
    def test_any_bytes_end_in_a_config_or_a_user_error(self, tmp_path_factory, content):
        path = tmp_path_factory.getbasetemp() / "any.yaml"
        path.write_bytes(content)
        with contextlib.suppress(UserError):
            config.load(str(path), [])

    @given(st.text(alphabet="rl: gamma\n-{}[],&*!|>'\"#%@`0.19e\t", max_size=80))
    def test_any_yaml_like_text_ends_in_a_config_or_a_user_error(self, tmp_path_factory, content):
        path = tmp_path_factory.getbasetemp() / "any.yaml"
        path.write_text(content)
        with contextlib.suppress(UserError):
            config.load(str(path), [])


class TestOverrides:
    @pytest.mark.parametrize(
        ("argument", "fix"),
        [
            ("learning_rate=1", "rl.learning_rate"),
            ("rl.learning_rate", "rl.learning_rate=VALUE"),
            ("--rl.learning_rate=1", "rl.learning_rate=VALUE"),
            ("+rl.learning_rate=1", "rl.learning_rate=VALUE"),
            ("rl=1", "rl.KEY=VALUE"),
            ("rl.learning_rate=", "null"),
            ("=1", "for example"),
            ("mine.yaml", "--config mine.yaml"),
            ("hello", "for example"),
            ("trainer.total_epochs=3", "verl.trainer.total_epochs=3"),
            ("lr=3", "rl.learning_rate"),
            ("", "for example"),
        ],
    )
    def test_bad_forms_are_explained(self, argument, fix):
        result = parse_override(argument)
        assert isinstance(result, Fault)
        assert fix in result.fix

    def test_value_keeps_everything_after_the_first_equals_sign(self, here):
        assert load(here, "", "training.output_dir=a=b c").training.output_dir == "a=b c"

    def test_quotes_that_a_shell_left_are_taken_off(self, here):
        assert load(here, "", "training.output_dir='my runs'").training.output_dir == "my runs"

    def test_chinese_paths(self, here):
        assert load(here, "", "training.output_dir=输出/第一次").training.output_dir == "输出/第一次"

    WORDS = st.text(min_size=1).filter(
        lambda s: (
            s.strip()
            and s.strip().lower() not in casting.NULL_WORDS
            and s.lstrip()[0] not in "[{"
            and not (len(s.strip()) > 1 and s.strip()[0] == s.strip()[-1] and s.strip()[0] in "'\"")
        )
    )

    @given(WORDS)
    def test_any_text_arrives_as_it_was_typed(self, text):
        entries = config.override_entries(parse_overrides([f"training.output_dir={text}"]), [])
        value = casting.cast(entries["training.output_dir"].value, str)
        assert value == text

    @given(st.lists(st.text(max_size=30), max_size=4))
    def test_no_command_line_breaks_the_parser(self, arguments):
        with contextlib.suppress(UserError):
            parse_overrides(arguments)

    def test_verl_keys_pass_through_flat_and_typed(self, here):
        cfg = load(here, "verl: {a: {b: 1, c: [1, 2]}, d.e: x}\n", "verl.a.b=1e-3", "verl.f={g: true}", "verl.h=null")
        assert cfg.verl == {"a.b": 0.001, "a.c": [1, 2], "d.e": "x", "f.g": True, "h": None}

    def test_a_verl_key_replaces_what_lies_below_it(self, here):
        assert load(here, "verl: {a: {b: {c: 1}}}\n", "verl.a.b=2").verl == {"a.b": 2}
        assert load(here, "verl: {a: {b: 2}}\n", "verl.a.b.c=1").verl == {"a.b.c": 1}


class TestPaths:
    def test_current_folder_first_and_without_a_word(self, here):
        cfg = load(here)
        assert cfg.data.train_file == "train.jsonl"
        assert cfg.source.notices == ()

    def test_then_the_folder_above_configs_and_it_says_so(self, here, tmp_path_factory):
        repository = tmp_path_factory.mktemp("repo")
        (repository / "configs").mkdir()
        (repository / "only_there.jsonl").write_text("{}\n")
        path = write(repository / "configs", BASE.replace("train.jsonl", "only_there.jsonl"))
        cfg = config.load(path, [])
        assert cfg.data.train_file == str(repository / "only_there.jsonl")
        assert "not in the current folder" in cfg.source.notices[0]

    def test_a_missing_file_names_the_nearest(self, here):
        fault = only_fault(load, here, "", "data.train_file=trian.jsonl")
        assert "train.jsonl" in fault.fix

    @pytest.mark.parametrize("name", ["Qwen/Qwen2-0.5B", "gpt2", "org/model.v2"])
    def test_names_on_the_hub_are_left_alone(self, here, name):
        assert load(here, "", f"model.model_name_or_path={name}").model.model_name_or_path == name

    @pytest.mark.parametrize(
        "name", ["./tiny2", "/no/such/model", "~/no_such_model", "a/b/c", "tiny/x", r"C:\models\q"]
    )
    def test_what_looks_like_a_path_must_exist(self, here, name):
        assert "no such folder" in only_fault(load, here, "", f"model.model_name_or_path={name}").rule

    @pytest.mark.parametrize("name", ["tiny/", "./tiny", "./tiny/"])
    def test_trailing_slashes_do_no_harm(self, here, name):
        assert not load(here, "", f"model.model_name_or_path={name}").model.model_name_or_path.endswith("/")

    def test_home_is_expanded(self, here, monkeypatch):
        monkeypatch.setenv("HOME", str(here))
        assert load(here, "", "data.train_file=~/train.jsonl").data.train_file == str(here / "train.jsonl")

    def test_patterns_are_for_the_data_room(self, here):
        assert load(here, "", "data.train_file=part-*.jsonl").data.train_file == "part-*.jsonl"

    def test_a_reward_function_file_is_found(self, here):
        (here / "r.py").write_text("")
        assert load(here, "", "rl.reward=function:r.py:score").rl.reward == "function:r.py:score"

    def test_an_inner_folder_of_an_existing_one(self, here):
        assert paths.looks_local("tiny/inner", "model", here)
        assert not paths.looks_local("owner/inner", "model", here)


class TestProfiles:
    TEXT = "profile: auto\nprofiles: {cpu: {rl: {ppo_epochs: 2}}, gpu: {rl: {ppo_epochs: 3}}}\n"

    def with_probe(self, monkeypatch, probe):
        monkeypatch.setattr(profile, "probe_machine", lambda: probe)

    def test_auto_takes_cpu_without_a_gpu(self, here, monkeypatch):
        self.with_probe(monkeypatch, CPU)
        cfg = load(here, self.TEXT)
        assert (cfg.rl.ppo_epochs, cfg.source.profile, cfg.source.profile_why) == (2, "cpu", CPU.why_no_gpu)

    def test_auto_takes_gpu_with_one(self, here, monkeypatch):
        self.with_probe(monkeypatch, Probe(gpus=(H200,)))
        cfg = load(here, self.TEXT)
        assert (cfg.rl.ppo_epochs, cfg.source.profile) == (3, "gpu")
        assert "H200" in cfg.source.profile_why

    def test_the_device_decides_where_it_is_set(self, here, monkeypatch):
        self.with_probe(monkeypatch, Probe(gpus=(H200,)))
        assert load(here, self.TEXT, "training.device=cpu").source.profile == "cpu"
        self.with_probe(monkeypatch, CPU)
        assert load(here, self.TEXT, "training.device=cuda").source.profile == "gpu"

    def test_profiles_may_have_other_names(self, here):
        cfg = load(here, "profiles: {tiny: {rl: {ppo_epochs: 7}}}\n", "profile=tiny")
        assert cfg.rl.ppo_epochs == 7

    def test_an_unknown_profile_names_the_real_ones(self, here):
        for fault in (
            only_fault(load, here, self.TEXT, "profile=tpu"),  # as near to cpu as to gpu, and neither is meant
            only_fault(load, here, self.TEXT.replace("auto", "cpuu")),
        ):
            assert fault.fix.startswith("leave it out")
            assert {"auto", "cpu", "gpu"} <= set(re.findall(r"\w+", fault.fix))

    def test_faults_inside_a_profile_have_their_line(self, here):
        text = "profile: cpu\nprofiles:\n  cpu:\n    rl:\n      learning_rate: -1\n      lr: 1\n"
        faults = faults_of(load, here, text)
        assert {f.field.split(":")[-1] for f in faults} == {"7)", "8)"}

    def test_a_profile_inside_a_profile(self, here):
        assert only_fault(load, here, "profile: a\nprofiles: {a: {profile: b}}\n")

    @pytest.mark.parametrize("visible", ["", "-1"])
    def test_hidden_devices_are_no_devices(self, monkeypatch, visible):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert profile.find_gpus() == ((), "CUDA_VISIBLE_DEVICES hides all devices")

    def test_a_driver_without_a_cuda_build_of_torch(self, monkeypatch):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(profile.ctypes, "CDLL", lambda name: None)
        monkeypatch.setattr(profile, "torch_has_cuda", lambda: False)
        assert "without CUDA" in profile.find_gpus()[1]

    def test_the_driver_answers_in_lines(self, monkeypatch):
        answer = types.SimpleNamespace(returncode=0, stdout="85899345920 -1 8 0 NVIDIA A100-SXM4\n", stderr="")
        monkeypatch.setattr(profile.subprocess, "run", lambda *a, **k: answer)
        gpus, why = profile.ask_driver()
        assert gpus == (Gpu(name="NVIDIA A100-SXM4", memory_bytes=85899345920, capability=(8, 0)),)
        assert why == ""

    def test_a_driver_that_fails_gives_its_reason(self, monkeypatch):
        answer = types.SimpleNamespace(returncode=1, stdout="", stderr="cuInit returned 999\n")
        monkeypatch.setattr(profile.subprocess, "run", lambda *a, **k: answer)
        assert profile.ask_driver() == ((), "the CUDA driver refused: cuInit returned 999")

    @pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build a stand-in driver with")
    @pytest.mark.parametrize(
        ("status", "count", "why"), [(0, 2, ""), (0, 0, "sees no device"), (999, 2, "cuInit returned 999")]
    )
    def test_the_question_to_the_driver_fits_its_interface(self, tmp_path, monkeypatch, status, count, why):
        """Against a stand-in libcuda with the signatures of cuda.h."""
        (tmp_path / "cuda.c").write_text(STAND_IN_DRIVER.replace("STATUS", str(status)).replace("COUNT", str(count)))
        library = str(tmp_path / "libcuda.so.1")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, str(tmp_path / "cuda.c")], check=True)
        monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
        gpus, reason = profile.ask_driver()
        assert why in reason
        assert len(gpus) == (0 if why else count)
        assert all(gpu == Gpu(name="Stand-in GPU", memory_bytes=24 << 30, capability=(8, 9)) for gpu in gpus)

    @pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build a stand-in driver with")
    @pytest.mark.parametrize(("status", "free"), [(0, 3 << 30), (999, None)])
    def test_the_question_to_nvml_fits_its_interface(self, tmp_path, monkeypatch, status, free):
        """Against stand-ins with the signatures of cuda.h and nvml.h: the device is named by its UUID."""
        driver = STAND_IN_DRIVER.replace("STATUS", "0").replace("COUNT", "1") + STAND_IN_UUID
        for name, text in (("cuda", driver), ("nvidia-ml", STAND_IN_NVML.replace("STATUS", str(status)))):
            (tmp_path / f"{name}.c").write_text(text)
            library = str(tmp_path / f"lib{name}.so.1")
            subprocess.run(["cc", "-shared", "-fPIC", "-o", library, str(tmp_path / f"{name}.c")], check=True)
        monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
        (gpu,), _ = profile.ask_driver()
        assert gpu.free_bytes == free

    def test_cpus_are_at_least_one_and_at_most_the_affinity(self, monkeypatch):
        monkeypatch.setattr(profile, "cgroup_quota", lambda: 0.5)
        assert profile.usable_cpus() == 1
        monkeypatch.setattr(profile, "cgroup_quota", lambda: None)
        assert profile.usable_cpus() == len(os.sched_getaffinity(0))


class TestResolve:
    def test_no_auto_is_left(self, here):
        for probe in (CPU, Probe(gpus=(H200,))):
            cfg = config.resolve(load(here), probe).cfg
            left = [key for key in names.all_keys() if rules.value_of(cfg, key) == "auto"]
            assert left == ["rl.desirable_weight", "rl.undesirable_weight"]  # they follow from the data

    def test_every_choice_has_a_reason(self, here):
        resolved = config.resolve(load(here), CPU)
        assert {"training.device", "training.backend", "model.torch_dtype"} <= {c.field for c in resolved.choices}
        assert all(choice.why for choice in resolved.choices)

    def test_what_the_method_does_not_read_is_not_listed(self, here):
        resolved = config.resolve(load(here, "", "rl.rl_type=dpo"), CPU)
        assert "rl.kl_placement" not in {c.field for c in resolved.choices}
        assert "rl.beta" in {c.field for c in resolved.choices}

    @pytest.mark.parametrize(
        ("probe", "dtype"),
        [(CPU, "float32"), (Probe(gpus=(H200,)), "bfloat16"), (Probe(gpus=(T4,)), "float16")],
        ids=["cpu", "h200", "t4"],
    )
    def test_precision_follows_the_device(self, here, probe, dtype):
        assert config.resolve(load(here), probe).cfg.model.torch_dtype == dtype

    def test_what_was_written_is_kept(self, here):
        cfg = config.resolve(load(here, "", "model.torch_dtype=float32"), Probe(gpus=(H200,))).cfg
        assert cfg.model.torch_dtype == "float32"

    def test_old_log_probs_are_recomputed_unless_told_otherwise(self, here):
        assert config.resolve(load(here), CPU).cfg.rl.recompute_old_log_probs is True
        told = load(here, "", "rl.recompute_old_log_probs=false")
        assert config.resolve(told, CPU).cfg.rl.recompute_old_log_probs is False

    def test_a_gpu_that_is_not_there(self, here):
        fault = only_fault(config.resolve, load(here, "", "training.device=cuda"), CPU)
        assert "no CUDA driver" in fault.rule

    def test_more_gpus_than_there_are(self, here):
        cfg = load(here, "", "training.num_devices=2", "rl.rollout_batch_size=16")
        assert "shows 1 GPU" in only_fault(config.resolve, cfg, Probe(gpus=(H200,))).rule

    def test_several_gpus_go_to_ray(self, here):
        cfg = load(here, "", "training.num_devices=2", "rl.rollout_batch_size=16")
        assert config.resolve(cfg, Probe(gpus=(H200, H200))).cfg.training.backend == "ray"

    def test_flash_attention_must_be_there(self, here):
        cfg = load(here, "", "model.use_flash_attention_2=true")
        assert "CUDA only" in faults_of(config.resolve, cfg, CPU)[0].rule
        assert "not installed" in only_fault(config.resolve, cfg, Probe(gpus=(H200,))).rule
        ready = Probe(gpus=(H200,), has_flash_attention=True)
        assert config.resolve(cfg, ready).cfg.model.use_flash_attention_2

    def test_float16_needs_a_gpu(self, here):
        cfg = load(here, "", "model.torch_dtype=float16")
        assert "loss scaler" in only_fault(config.resolve, cfg, CPU).rule
        assert config.resolve(cfg, Probe(gpus=(H200,))).cfg.model.torch_dtype == "float16"

    def test_vllm_must_be_there(self, here):
        cfg = load(here, "", "rl.rollout_engine=vllm")
        assert "CUDA only" in faults_of(config.resolve, cfg, CPU)[0].rule
        fault = only_fault(config.resolve, cfg, Probe(gpus=(H200,)))
        assert (fault.field, "write hf or auto" in fault.fix) == ("rl.rollout_engine", True)
        assert config.resolve(cfg, WITH_VLLM).cfg.rl.rollout_engine == "vllm"

    @pytest.mark.parametrize("setting", ["rl.temperature=3", "training.memory_budget_gb=20"])
    def test_what_vllm_does_not_take(self, here, setting):
        fault = only_fault(load, here, "", "rl.rollout_engine=vllm", setting)
        assert fault.field.startswith(setting.partition("=")[0])
        assert "rl.rollout_engine=hf" in fault.fix

    @pytest.mark.parametrize("probe", [WITH_VLLM, Probe(gpus=(H200,)), CPU])
    def test_hf_is_chosen_however_long_the_run(self, here, probe):
        """As measured; see choose_engine."""
        for steps in (1, 10_000):
            cfg = config.resolve(load(here, "", f"training.max_steps={steps}"), probe).cfg
            assert cfg.rl.rollout_engine == "hf"

    def test_offload_on_a_cpu_is_mentioned(self, here):
        cfg = config.resolve(load(here, "", "rl.actor_offload=cpu"), CPU).cfg
        assert "rl.actor_offload" in cfg.source.notices[-1]

    def test_kl_defaults_follow_the_method(self, here):
        ppo = config.resolve(load(here), CPU).cfg.rl
        grpo = config.resolve(load(here, "", "rl.rl_type=grpo"), CPU).cfg.rl
        assert (ppo.kl_placement, ppo.kl_estimator) == ("reward", "kl")
        assert (grpo.kl_placement, grpo.kl_estimator) == ("loss", "low_var_kl")

    def test_the_resolved_config_is_read_back_the_same(self, here):
        cfg = config.resolve(load(here, "verl: {a: {b: [1, 2.5]}}\n", "rl.learning_rate=3e-6"), CPU).cfg
        again = config.load(write(here, config.to_yaml(cfg), "dumped.yaml"), [])
        assert dataclasses.replace(again, source=cfg.source) == cfg


class TestFromPython:
    def test_objects_and_mappings(self, here):
        model = ModelArguments(model_name_or_path="tiny")
        cfg = config.from_arguments(
            model, {"train_file": "train.jsonl"}, RLArguments(rl_type="grpo"), {"output_dir": "o"}
        )
        assert (cfg.rl.rl_type, cfg.training.output_dir) == ("grpo", "o")
        assert cfg.source.config_path is None

    def test_the_same_checks_as_a_file(self, here):
        faults = faults_of(
            config.from_arguments,
            ModelArguments(model_name_or_path="./no"),
            {"train_file": "train.jsonl", "max_len": 3},
            RLArguments(learning_rate="abc", temperature=0),  # type: ignore[arg-type]
            {"output": 1},
            {"reward_model": {"enable": True}},
        )
        assert len(faults) == 6
        assert "rl.learning_rate" in {f.field for f in faults}

    def test_numbers_as_text_are_understood(self, here):
        rl = RLArguments(learning_rate="1e-5", warmup_ratio="10%")  # type: ignore[arg-type]
        cfg = config.from_arguments({"model_name_or_path": "tiny"}, {"train_file": "train.jsonl"}, rl)
        assert (cfg.rl.learning_rate, cfg.rl.warmup_ratio) == (1e-5, 0.1)

    def test_a_section_of_the_wrong_kind(self, here):
        faults = faults_of(config.from_arguments, "tiny", {"train_file": "train.jsonl"})
        assert any(f.field == "model" for f in faults)


class TestCost:
    def test_reading_a_config_imports_nothing_heavy(self, here):
        script = (
            "import sys\nfrom quickstart import config\n"
            "r = config.resolve(config.load(sys.argv[1], []))\nprint(config.to_yaml(r.cfg)[:6])\n"
            "heavy = {'torch', 'ray', 'verl', 'transformers', 'datasets', 'numpy', 'rich'} & set(sys.modules)\n"
            "assert not heavy, heavy\n"
        )
        command = [sys.executable, "-c", script, write(here, BASE)]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}
        )
        assert done.returncode == 0, done.stderr


def test_preference_types_count_rows_not_prompts():
    cfg = make(rl_type="dpo", per_device_train_batch_size=4, gradient_accumulation_steps=2, rollout_batch_size=3)
    assert cfg.rl.rl_type in PREFERENCE_TYPES
    assert rules.check_rules(cfg) == []
    assert config.samples_per_step(cfg) == 8
