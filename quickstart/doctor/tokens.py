"""The tokenizer of a model: chat template, end and padding tokens, ids inside the embedding, answers that can end.

:func:`load_tokenizer` is what a run uses too. The judges take facts or a loaded tokenizer. Not here: lengths (rows.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quickstart.arguments import RunConfig
from quickstart.doctor.finding import Finding, error, note, ok, warning
from quickstart.errors import Fault, UserError
from quickstart.imports import light

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMED_TEMPLATES = {"chatml": CHATML}
PROBE = "quickstart-answer"  # stands for an answer while a template is looked at


@dataclass(frozen=True, kw_only=True)
class TokenFacts:
    """What matters of a tokenizer and its model."""

    kind: str  # class
    size: int  # tokens, added ones included
    largest_id: int
    embedding: int  # rows of the embedding, vocab_size of config.json
    eos: str | None
    pad: str | None
    stop_ids: frozenset[int]  # what ends an answer: eos, and those of generation_config.json
    after_answer: tuple[int, ...] | None  # ids that the template writes after an answer; None: no template, or refused


def load_tokenizer(cfg: RunConfig) -> Any:
    """The policy's tokenizer with its chat template, checked for what training needs.

    Raises:
        UserError: it cannot be loaded, or has no end-of-text token (an answer could never end).
    """
    name = cfg.model.tokenizer_name_or_path or cfg.model.model_name_or_path
    field_name = "model.tokenizer_name_or_path" if cfg.model.tokenizer_name_or_path else "model.model_name_or_path"
    try:
        with light():  # transformers imports most of itself with the first tokenizer
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=cfg.model.trust_remote_code)
    except Exception as error:  # a damaged file fails in many ways: KeyError, TypeError, Rust's own exceptions
        first = f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"
        fix = "copy the tokenizer files of the original model there"
        raise UserError(Fault(field=field_name, found=name, rule=f"no tokenizer loads: {first}", fix=fix)) from error
    if tokenizer.eos_token_id is None:
        rule = "the tokenizer has no end-of-text token (eos_token), so no answer could end"
        fix = "set eos_token in the folder's tokenizer_config.json"
        raise UserError(Fault(field=field_name, found=name, rule=rule, fix=fix))
    if not tokenizer.chat_template and cfg.model.chat_template:
        tokenizer.chat_template = NAMED_TEMPLATES[cfg.model.chat_template]
    return tokenizer


def chat_template(cfg: RunConfig) -> str | None:
    """The named template that verl must be told about, for a tokenizer without one. cfg: models are folders."""
    folder = Path(cfg.model.tokenizer_name_or_path or cfg.model.model_name_or_path)
    if cfg.model.chat_template is None or has_own_template(folder):
        return None
    return NAMED_TEMPLATES[cfg.model.chat_template]


def token_facts(tokenizer: Any, folder: Path, config: dict[str, Any]) -> TokenFacts:
    """Facts of a loaded tokenizer, the model folder's generation_config.json and the model's config.json."""
    stop = {tokenizer.eos_token_id} - {None}
    path = folder / "generation_config.json"
    more = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
    stop |= set(more if isinstance(more, list) else [more]) - {None}
    return TokenFacts(
        kind=type(tokenizer).__name__,
        size=len(tokenizer),
        largest_id=max(tokenizer.get_vocab().values(), default=0),
        embedding=int(config.get("vocab_size", 0)),
        eos=tokenizer.eos_token,
        pad=tokenizer.pad_token,
        stop_ids=frozenset(stop),
        after_answer=after_answer(tokenizer),
    )


def after_answer(tokenizer: Any) -> tuple[int, ...] | None:
    """The ids that the chat template writes after an assistant's answer."""
    import jinja2

    if not tokenizer.chat_template:
        return None
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except jinja2.TemplateError:  # a template with rules of its own: rows are tried one by one by the data room
        return None
    _, found, tail = text.rpartition(PROBE)
    return tuple(tokenizer(tail, add_special_tokens=False)["input_ids"]) if found else None


def has_own_template(folder: Path) -> bool:
    """Whether the tokenizer's folder brings a chat template, as a file or inside tokenizer_config.json."""
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    path = folder / "tokenizer_config.json"
    return path.is_file() and bool(json.loads(path.read_text(encoding="utf-8")).get("chat_template"))


def judge_tokens(facts: TokenFacts, field: str) -> Iterable[Finding]:
    """Ids, end and padding."""
    yield judge_embedding(facts, field)
    yield judge_padding(facts, field)
    yield judge_ending(facts, field)


def judge_embedding(facts: TokenFacts, field: str) -> Finding:
    """A token without a row in the embedding ends in an index error, on a GPU in a device assert."""
    found = f"{facts.kind} with {facts.size:,} tokens, embedding of {facts.embedding:,} rows"
    if facts.largest_id < facts.embedding:
        return ok("tokenizer", found)
    fix = "use the tokenizer that belongs to the model, or a model whose embedding was resized for it"
    rule = f"its largest token id, {facts.largest_id:,}, has no row there"
    return error("tokenizer", found, fix, field=field, rule=rule)


def judge_padding(facts: TokenFacts, field: str) -> Finding:
    """Padding by the end token is harmless here, since masks are made from lengths."""
    if facts.pad is None:
        return note("pad and eos", f"eos {facts.eos}, no pad token: verl pads with eos; masks come from lengths")
    if facts.pad == facts.eos:
        found = f"pad and eos are both {facts.eos}; masks come from lengths, so the end of an answer is trained on"
        return note("pad and eos", found, field=field)
    return ok("pad and eos", f"eos {facts.eos}, pad {facts.pad}")


def judge_ending(facts: TokenFacts, field: str) -> Finding:
    """An answer ends with what the template writes after one; generation must stop there."""
    if facts.after_answer is None or facts.stop_ids & set(facts.after_answer):
        return ok("end of answers", "the template ends an answer with a token that generation stops at")
    fix = "add the template's end token to eos_token_id in generation_config.json, or use the instruct version"
    rule = "generation stops at none of the tokens that the chat template writes after an answer"
    return warning("end of answers", f"stop ids {sorted(facts.stop_ids)}", fix, field=field, rule=rule)


def judge_template(cfg: RunConfig, *, has_template: bool) -> Finding:
    """A chat template of its own, or the named one that the config asks for; never a silent one."""
    field = "model.chat_template"
    if has_template:
        if cfg.model.chat_template:
            return note("chat template", "the tokenizer's own; the named one is not used", "write null", field=field)
        return ok("chat template", "the tokenizer's own")
    if cfg.model.chat_template:
        return note("chat template", f"none of its own; {cfg.model.chat_template} stands in, as asked", field=field)
    fix = "set model.chat_template=chatml, or use the instruct version of the model"
    rule = "prompts are conversations and must be written in the model's template"
    return error("chat template", "the tokenizer has no chat template", fix, field=field, rule=rule)


def judge_positions(positions: int | None, cfg: RunConfig) -> Finding:
    """Prompt and answer must fit into what the model can read; beyond it answers are cut short."""
    wanted = cfg.data.max_prompt_length + cfg.data.max_response_length
    if positions is None or wanted <= positions:
        return ok(
            "longest sequence", f"{wanted} tokens" + (f" of {positions:,} that the model reads" if positions else "")
        )
    fix = f"set data.max_prompt_length + data.max_response_length to {positions} or less"
    rule = f"the model reads {positions} tokens (max_position_embeddings)"
    found = f"{cfg.data.max_prompt_length} + {cfg.data.max_response_length} = {wanted} tokens"
    return error("longest sequence", found, fix, field="data.max_response_length", rule=rule)
