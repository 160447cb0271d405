"""Reads and writes a whole conversation as one JSON document: the format of `/save` and of earlier versions.

A file may come from a stranger: it is bounded and checked field by field when read, and written beside its name and
renamed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ktcli import smallfiles
from ktcli.chat.conversation import ROLES, Conversation, Omission, Saved, Turn
from ktcli.errors import BadCheckpoint, UsageError, refusals
from ktcli.sampling import SamplingSettings
from ktcli.text.files import read_json, without_surrogates

VERSION = 1
SUFFIX = ".json"
MAX_FILE_BYTES = 16 << 20  # millions of tokens
MAX_STOPS = 1000  # texts; each is looked for in every piece of an answer


def save(path: Path, saved: Saved) -> None:
    """Writes a chat to a file, as a JSON document, atomically.

    Raises:
        KtError: the system refuses.
    """
    write(path, text_of(saved))


def text_of(saved: Saved) -> str:
    """Returns the JSON text of the file in which `/save` stores a chat."""
    conversation = saved.conversation
    document = {
        "kt_chat": VERSION,
        "model": saved.model,
        "system": conversation.system,
        "turns": conversation.turns,
        "sampling": asdict(saved.sampling),
        **({"omitted": asdict(conversation.omitted)} if conversation.omitted.turns else {}),
        **({"settings": saved.others} if saved.others else {}),
        **({"unfinished": True} if saved.unfinished else {}),
    }
    return json.dumps(document, ensure_ascii=False, indent=1) + "\n"


def markdown_of(saved: Saved) -> str:
    """Returns a saved conversation as Markdown text, with a heading for each message."""
    model = "".join(filter(str.isprintable, saved.model))
    names = {"system": "System", "user": "You", "assistant": model or "The model"}
    return "\n".join(
        f"## {names[m['role']]}\n\n{m['content']}\n" for m in saved.conversation.messages
    )


def write(path: Path, text: str) -> None:
    """Writes the text of a chat to a file, atomically, readable by its owner only.

    Raises:
        KtError: the system refuses.
    """
    with refusals(f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        smallfiles.write(path, text.encode("utf-8", "replace"), mode=0o600)


def read(path: Path) -> Saved:
    """Returns the chat in a file that holds a JSON document, as `/save` writes it.

    Raises:
        UsageError: it is not a saved chat.
    """
    try:
        document = read_json(path, MAX_FILE_BYTES)
    except BadCheckpoint as error:
        raise UsageError(str(error)) from error
    if document.get("kt_chat") != VERSION:
        raise UsageError(
            f"{path} is not a chat that this version of kt can read",
            hint="kt chats lists them all; kt chats rm NAME removes one",
        )
    sampling = document.get("sampling")
    try:
        settings = sampling_of(sampling if isinstance(sampling, dict) else {})
        turns = [_turn(turn) for turn in _list(document.get("turns"))]
        conversation = Conversation(
            plain_text(document.get("system", "")), turns, _omission(document, len(turns))
        )
        model = plain_text(document.get("model", ""))
        others = others_of(document.get("settings", {}))
        return Saved(model, conversation, settings, others, document.get("unfinished") is True)
    except (ValueError, TypeError, OverflowError, UsageError) as error:
        raise UsageError(f"{path} is damaged: {str(error)[:100]}") from error


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("a list is missing")
    return value


def _turn(value: Any) -> Turn:
    if not isinstance(value, Mapping) or value.get("role") not in ROLES[1:]:
        raise ValueError("a turn is neither the user's nor the assistant's")
    return {"role": str(value["role"]), "content": plain_text(value.get("content"))}


def _omission(document: Mapping[str, Any], most: int) -> Omission:
    given = document.get("omitted", {})
    turns = given.get("turns", 0) if isinstance(given, Mapping) else None
    if type(turns) is not int or not 0 <= turns <= most or turns % 2:
        raise ValueError("the number of omitted turns is not a number")
    return Omission(turns, plain_text(given.get("summary", "")))


def plain_text(value: Any) -> str:
    """Returns a value that should be a string, with question marks for lone surrogates.

    Raises:
        ValueError: it is not a string.
    """
    if not isinstance(value, str):
        raise ValueError("a field that should be a string is not")
    return without_surrogates(value)


def others_of(values: Any) -> dict[str, Any]:
    """Returns the settings in a decoded JSON object that are known and not of sampling, by name: max_tokens, stops,
    thinking, think_budget, stated.

    Raises:
        ValueError: it is not an object, or a setting has a wrong type or is out of range.
    """
    if not isinstance(values, Mapping):
        raise ValueError("its settings are not an object")
    known = ("max_tokens", "stops", "thinking", "think_budget", "stated")
    found = {key: values[key] for key in known if key in values}
    for key in ("max_tokens", "think_budget"):
        most = found.get(key)
        if most is not None and (type(most) is not int or most < 1):
            raise ValueError(f"{key} is not a number of tokens")
    thinking = found.get("thinking")
    if thinking is not None and type(thinking) is not bool:
        raise ValueError("thinking is neither on nor off")
    if "stops" in found:
        found["stops"] = tuple(plain_text(stop) for stop in _list(found["stops"]))
        if len(found["stops"]) > MAX_STOPS:
            raise ValueError(f"it has more than {MAX_STOPS:,} stop texts")
    if "stated" in found:
        stated = {plain_text(name) for name in _list(found["stated"])}
        found["stated"] = sorted(stated & set(SamplingSettings.__slots__))
    return found


def sampling_of(values: Mapping[str, Any]) -> SamplingSettings:
    """Returns the sampling settings in a decoded JSON object, such as temperature and top_k; unknown names are left
    out.

    Raises:
        ValueError, OverflowError, UsageError: one is no number or out of range.
    """
    if not isinstance(values, Mapping):
        raise ValueError("the sampling settings are not an object")
    known = {
        key: value
        for key, value in values.items()
        if key in SamplingSettings.__slots__ and value is not None
    }
    pairs = known.pop("logit_bias", ())
    if not isinstance(pairs, (list, tuple)):
        raise ValueError("logit_bias is not a list")
    biases = [tuple(pair) for pair in pairs if isinstance(pair, (list, tuple))]
    if len(biases) < len(pairs) or any(len(pair) != 2 for pair in biases):
        raise ValueError("logit_bias is not a list of pairs")
    if not all(type(id) is int and type(bias) in (int, float) for id, bias in biases):
        raise ValueError("logit_bias is not a list of token ids and numbers")
    if not all(isinstance(value, (bool, int, float)) for value in known.values()):
        raise ValueError("a sampling setting is not a number")
    known["logit_bias"] = tuple((id, float(bias)) for id, bias in biases)
    for key in known.keys() & {"top_k", "seed"}:
        known[key] = int(known[key])
    return SamplingSettings(**{**known, "greedy": bool(known.get("greedy", False))})
