"""Is a folder a reward model that can be used? Looked at before loading: configuration, tensor names, template.

A checkpoint without a score head would get a random one at each load, one with two outputs would be read by its last
(verl experimental/reward_loop/reward_loop.py:242): both are refused. Not here: loading, scoring (model.py).
"""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

from quickstart.errors import Fault, UserError

SETTING = "model.reward_model_name_or_path"
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
PROBE = "an answer"

Shapes = dict[str, tuple[int, ...]]  # tensor name -> shape


def check_reward_model(path: str, trust_remote_code: bool) -> Any:
    """The reward model's tokenizer, after its folder has been found good.

    Args:
        path: a local folder.

    Raises:
        UserError: no such folder, not a sequence-classification architecture, no score head or not one output,
            or a tokenizer that cannot write a conversation.
    """
    from transformers import AutoConfig, AutoTokenizer

    folder = Path(path)
    if not folder.is_dir():
        raise refused(path, "no folder of that name", "write the path of a reward model's folder")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        rule = f"transformers cannot read it: {str(error).strip().splitlines()[0]}"
        raise refused(path, rule, "name a folder with config.json and a tokenizer") from error
    empty = _empty_model(config, path, trust_remote_code)
    _check_head(empty, tensor_shapes(folder), config, path)
    _check_vocabulary(empty, tokenizer, path)
    _check_template(tokenizer, path)
    return tokenizer


def refused(found: str, rule: str, fix: str) -> UserError:
    """One fault of the reward model."""
    return UserError(Fault(field=SETTING, found=found, rule=rule, fix=fix))


def _empty_model(config: Any, path: str, trust_remote_code: bool) -> Any:
    """The architecture with one output, without weights: its parameter names tell which are the head's."""
    import torch
    from transformers import AutoModelForSequenceClassification

    config = deepcopy(config)
    config.num_labels = 1
    try:
        with torch.device("meta"):
            return AutoModelForSequenceClassification.from_config(config, trust_remote_code=trust_remote_code)
    except ValueError as error:
        rule = f"{config.model_type} has no sequence-classification form in transformers"
        raise refused(path, rule, "name a reward model of another architecture") from error


def tensor_shapes(folder: Path) -> Shapes:
    """Names and shapes of all tensors of a checkpoint, from the headers alone. Raises UserError."""
    from safetensors import SafetensorError

    shapes: Shapes = {}
    files = _weight_files(folder)
    if not files:
        raise refused(str(folder), "it has no weight file", "put model.safetensors there, or download the model again")
    for file in files:
        try:
            shapes |= _shapes_of(file)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise refused(str(file), f"the weight file is damaged: {error}", "download the file again") from error
    return shapes


def _weight_files(folder: Path) -> list[Path]:
    for name in INDEXES:
        if (folder / name).is_file():
            index = json.loads((folder / name).read_text(encoding="utf-8"))
            return [folder / shard for shard in sorted(set(index["weight_map"].values()))]
    return [folder / name for name in SINGLE_FILES if (folder / name).is_file()][:1]


def _shapes_of(file: Path) -> Shapes:
    if file.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(file, framework="pt") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    import torch

    state = torch.load(file, map_location="meta", weights_only=True)
    return {name: tuple(value.shape) for name, value in state.items()}


def _check_head(empty: Any, shapes: Shapes, config: Any, path: str) -> None:
    prefix = f"{empty.base_model_prefix}."
    head = {name: tuple(value.shape) for name, value in empty.named_parameters() if not name.startswith(prefix)}
    missing = [name for name in head if name not in shapes]
    if missing:
        rule = f"no score head in the checkpoint: {', '.join(missing)} is missing and would be random at each load"
        fix = "name a reward model that was trained as one (AutoModelForSequenceClassification, num_labels=1)"
        raise refused(f"{path}, {_what_it_is(shapes)}", rule, fix)
    for name, shape in head.items():
        if shapes[name] == shape:
            continue
        if shape[0] == 1 and shapes[name][1:] == shape[1:]:
            labels = ", ".join(map(str, config.id2label.values()))
            rule = f"a reward model must have 1 output, this one has {shapes[name][0]} ({name} {list(shapes[name])})"
            fix = "name a model with one output; a classifier's labels are no reward"
            raise refused(f"{path} with labels {labels}", rule, fix)
        rule = f"{name} has shape {list(shapes[name])} where its config.json wants {list(shape)}"
        raise refused(path, rule, "copy config.json and weights from the same model")


def _what_it_is(shapes: Shapes) -> str:
    """In words, for a checkpoint without a score head."""
    heads = sorted(name for name in shapes if name.startswith(("v_head", "value_head", "rm_head", "reward_head")))
    if heads:
        return f"with a head of another kind ({heads[0]})"
    return "a language model"


def _check_vocabulary(empty: Any, tokenizer: Any, path: str) -> None:
    """Tokens that transformers adds on loading do not count: no text has them. (model.py looks at each text's ids.)"""
    rows = empty.get_input_embeddings().weight.shape[0]
    if tokenizer.vocab_size > rows:
        rule = f"its tokenizer has {tokenizer.vocab_size} tokens and its model {rows}"
        raise refused(path, rule, "copy the tokenizer files of the same model into the folder")


def _check_template(tokenizer: Any, path: str) -> None:
    """Write a short conversation, as every answer will be."""
    import jinja2

    if not tokenizer.chat_template:
        rule = "its tokenizer has no chat template, so a conversation cannot be written for it"
        raise refused(path, rule, "add chat_template.jinja to the folder, the template that it was trained with")
    conversation = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": PROBE}]
    try:
        text = tokenizer.apply_chat_template(conversation, tokenize=False)
    except jinja2.TemplateError as error:
        rule = f"its chat template refuses a question with an answer: {error}"
        raise refused(path, rule, "correct the template") from error
    if PROBE not in text:
        rule, fix = "its chat template leaves the answer out", "correct the template"
        raise refused(f"{path}, which writes {text!r}", rule, fix)
