"""From the many ways to write a conversation to one: a list of {"role", "content"}, both text.

Understood: plain text, role/content, ShareGPT's from/value, content in parts, HH-RLHF's "Human:/Assistant:" text.
Not here: whether a conversation makes a good prompt (check.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from quickstart.data.rows import Message, RowFault, shown

ROLES = ("system", "user", "assistant", "tool")
# ShareGPT's names and those of its relatives.
ROLE_NAMES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
HH_MARK = re.compile(r"\n\n(Human|Assistant):")
KNOWN_KEYS = frozenset(("role", "content", "from", "value"))

Remark = Callable[[str], None]


def to_messages(value: Any, column: str, remark: Remark) -> list[Message]:
    """A conversation from text (one user message, or HH-RLHF's markers) or from a list of messages.

    Raises:
        RowFault: anything else, an unknown role, or content that is not text.
    """
    if isinstance(value, str):
        if HH_MARK.match(value):
            remark(f"{column}: Human:/Assistant: text taken as messages")
            return hh_turns(value)
        remark(f"{column}: text taken as one user message")
        return [{"role": "user", "content": value}]
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        rule = f"{column} must be text or a list of messages"
        raise RowFault(
            found=f"{column} {shown(value)}", rule=rule, fix='write "..." or [{"role": "user", "content": "..."}]'
        )
    return [to_message(item, column, remark) for item in value]


def to_message(item: Any, column: str, remark: Remark) -> Message:
    """One message as {"role", "content"}."""
    if not isinstance(item, dict):
        rule = f"a message in {column} must be an object with role and content"
        raise RowFault(found=shown(item), rule=rule, fix='write {"role": "user", "content": "..."}')
    role_key, content_key = ("role", "content") if "role" in item or "content" in item else ("from", "value")
    role = to_role(item.get(role_key), column, remark)
    content = to_content(item.get(content_key), f"{column}, {role}", remark)
    unused = sorted(key for key, value in item.items() if key not in KNOWN_KEYS and value not in (None, [], ""))
    if "tool_calls" in unused:
        fix = "write the call as text into content, or leave the row out"
        raise RowFault(found="tool_calls in a message", rule="messages must be text", fix=fix)
    if unused:
        remark(f"{column}: keys of messages that are not used: {', '.join(unused)}")
    return {"role": role, "content": content}


def to_role(role: Any, column: str, remark: Remark) -> str:
    """One of ROLES."""
    if role in ROLES:
        return role
    name = role.strip().lower() if isinstance(role, str) else ""
    if name in ROLE_NAMES or name in ROLES:
        mapped = ROLE_NAMES.get(name, name)
        remark(f"{column}: role {role} taken as {mapped}")
        return mapped
    known = (*ROLES, *ROLE_NAMES)
    close = get_close_matches(name, known, n=1)
    fix = f"did you mean {close[0]}?" if close else f"use one of {', '.join(known)}"
    raise RowFault(found=f"role {shown(role)}", rule=f"a role in {column} must be known", fix=fix)


def to_content(content: Any, where: str, remark: Remark) -> str:
    """Text, or the text parts of a list put together."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content and all(isinstance(part, dict) for part in content):
        other = [
            part.get("type") for part in content if part.get("type") != "text" or not isinstance(part.get("text"), str)
        ]
        if not other:
            remark(f"{where}: content in parts put together")
            return "".join(part["text"] for part in content)
        rule, fix = "the models here read text only", "leave these rows out, or replace the part by text"
        raise RowFault(found=f"{where}: a part of type {shown(other[0])}", rule=rule, fix=fix)
    raise RowFault(
        found=f"{where}: content {shown(content)}", rule="the content of a message must be text", fix="write a string"
    )


def hh_turns(text: str) -> list[Message]:
    """HH-RLHF's dialogue text as messages; the blank space around the marks is not part of a turn.

    An open "Assistant:" at the end is where an answer belongs, not a message.
    """
    parts = HH_MARK.split(text)[1:]
    roles = {"Human": "user", "Assistant": "assistant"}
    turns = [{"role": roles[who], "content": what.strip()} for who, what in zip(parts[::2], parts[1::2], strict=True)]
    return turns[:-1] if turns[-1] == {"role": "assistant", "content": ""} else turns


def to_answer(value: Any, prompt: list[Message], column: str, remark: Remark) -> str | None:
    """One answer as text: given as text, as a message, or as a dialogue that begins with the prompt.

    Raises:
        RowFault: not one assistant message after the prompt.
    """
    if value is None or isinstance(value, str):
        return value
    messages = to_messages(value, column, remark)
    rest = messages[len(prompt) :] if messages[: len(prompt)] == prompt else messages
    if len(rest) == 1 and rest[0]["role"] == "assistant":
        return rest[0]["content"]
    roles = ", ".join(message["role"] for message in rest) or "nothing"
    rule = f"{column} must be one assistant message, alone or after the messages of the prompt"
    raise RowFault(found=f"{column} with {roles}", rule=rule, fix="check that it continues the prompt of the same row")
