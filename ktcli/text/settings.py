"""Reads a model's recommended sampling and its stop tokens: `generation_config.json` and related files.

Missing values mean off; `do_sample` false or missing means greedy, as transformers reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields, replace
from pathlib import Path
from typing import Any

from ktcli.errors import BadCheckpoint, UsageError
from ktcli.records import dataclass
from ktcli.sampling import SamplingSettings
from ktcli.text.around import AroundText
from ktcli.text.files import read_json_if_any
from ktcli.text.template import ChatTemplate, special_tokens
from ktcli.text.tokenizer import Tokenizer

_NUMBERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_FILE = "generation_config.json"
_MARK = "kt0answer"


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a chat.

    Attributes:
        sampling: how the next token is chosen.
        max_tokens: the most tokens of one answer; None: as many as the context holds.
        stops: texts that end an answer, beside the model's own stop tokens.
        drops: whether the oldest turns go unread when a question does not fit; else it is refused.
        think_budget: the most tokens of an answer's thoughts; None: as many as the model likes.
        thinking: whether a model that can do both thinks first; None: as it likes.
        stated: the names of the sampling settings that somebody stated, where the others are a server's own and not
            known here; None: all are in force as they are.
    """

    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    thinking: bool | None = None
    drops: bool = True
    think_budget: int | None = None
    stated: frozenset[str] | None = None

    def __post_init__(self) -> None:
        if self.think_budget is not None and self.think_budget < 1:
            raise UsageError(f"think-budget must be at least 1, not {self.think_budget}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UsageError(f"max-tokens must be at least 1, not {self.max_tokens}")

    @property
    def others(self) -> dict[str, Any]:
        """The settings beside `sampling`, by name: max_tokens, stops, thinking, think_budget, and `stated` unless that
        is None.
        """
        names = ("max_tokens", "stops", "thinking", "think_budget")
        stated = {} if self.stated is None else {"stated": sorted(self.stated)}
        return {name: getattr(self, name) for name in names} | stated

    def sampled(self, **given: Any) -> Settings:
        """Returns these settings with the given sampling values that are not None, set as `override` does.

        Raises:
            UsageError: a value is out of range.
        """
        names = {name for name, value in given.items() if value is not None}
        stated = None if self.stated is None else self.stated | names
        return replace(self, sampling=override(self.sampling, **given), stated=stated)

    def states(self, name: str) -> bool:
        """Returns whether a sampling setting was stated by the user, and not left to the server that answers; True for
        all settings of a model that runs here.
        """
        return self.stated is None or name in self.stated

    def restored(self, sampling: SamplingSettings, others: Mapping[str, Any]) -> Settings:
        """Returns these settings, overridden by those of a saved conversation: its sampling settings and its `others`,
        as the property of that name has them. If it was held with a server, only the sampling settings that the user
        stated are taken over.
        """
        more = dict(others)
        stated = more.pop("stated", None)
        # All of them were in force; a server need not hear of those that change nothing.
        if stated is None:
            changed = {
                each.name
                for each in fields(sampling)
                if getattr(sampling, each.name) != each.default
            }
            stated = None if self.stated is None else {"temperature", *changed}
        else:
            own = {name: getattr(sampling, name) for name in stated}
            sampling = replace(self.sampling, **own)
            stated = None if self.stated is None else stated
        found = None if stated is None else frozenset(stated)
        return replace(self, sampling=sampling, stated=found, **more)

    @property
    def variables(self) -> dict[str, Any]:
        """The variables that tell a chat template whether to think: `enable_thinking` and `thinking` (bool), and
        `reasoning_effort` ("high" or "low"); empty if the setting `thinking` is None.
        """
        if self.thinking is None:
            return {}
        names = dict.fromkeys(("enable_thinking", "thinking"), self.thinking)
        return {**names, "reasoning_effort": "high" if self.thinking else "low"}


def override(sampling: SamplingSettings, **given: Any) -> SamplingSettings:
    """Returns `sampling` with the given values that are not None; giving temperature, top_k, top_p or min_p ends greedy
    sampling, unless `greedy` is given, too.

    Raises:
        UsageError: a value is out of range.
    """
    changes = {key: value for key, value in given.items() if value is not None}
    if changes.keys() & {"temperature", "top_k", "top_p", "min_p"} and "greedy" not in changes:
        changes["greedy"] = False
    return replace(sampling, **changes)


def carried(current: Settings, before: Settings, after: Settings) -> Settings:
    """Returns the settings for a model that takes the place of another: `after`, with each setting of `current` that
    the user has changed from its value in `before`.

    Args:
        before, after: the settings with which the old and the new model begin.
    """

    def changes(now: Any, first: Any) -> dict[str, Any]:
        names = (field.name for field in fields(now) if field.name != "sampling")
        return {
            name: getattr(now, name) for name in names if getattr(now, name) != getattr(first, name)
        }

    sampling = replace(after.sampling, **changes(current.sampling, before.sampling))
    return replace(after, sampling=sampling, **changes(current, before))


def read_settings(folder: Path) -> Settings:
    """Returns the settings in a model's `generation_config.json`, without those that `unused_settings` names.

    Raises:
        BadCheckpoint: the file is damaged, or a setting is invalid.
    """
    path = folder / _FILE
    given = read_json_if_any(path)
    for name in _unused(given):
        del given[name]
    values: dict[str, Any] = {"greedy": given.get("do_sample") is not True}
    try:
        for name in _NUMBERS:
            if given.get(name) is not None:
                values[name] = _number(given[name], whole=name == "top_k")
        longest = given.get("max_new_tokens")
        most = None if longest is None else int(_number(longest, whole=True))
        return Settings(SamplingSettings(**values), most)
    except (UsageError, ValueError, OverflowError) as error:
        raise BadCheckpoint(f"{path} is invalid: {error}") from error


def unused_settings(folder: Path) -> tuple[str, ...]:
    """Returns a sentence on each setting in a model's `generation_config.json` that is not used, since it has no clear
    meaning.

    Raises:
        BadCheckpoint: the file is damaged.
    """
    given = read_json_if_any(folder / _FILE)
    return tuple(f"{name} is {given[name]} in {_FILE}, which is ignored" for name in _unused(given))


def _unused(given: Mapping[str, Any]) -> list[str]:
    """Returns the names of settings that are not used: some publishers write a penalty of 0 for none."""
    found = given.get("repetition_penalty")
    zero = isinstance(found, (int, float)) and not isinstance(found, bool) and found == 0
    return ["repetition_penalty"] if zero else []


def _number(value: Any, *, whole: bool) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{str(value)[:40]!r} is not a number")
    if whole and value != int(value):
        raise ValueError(f"{value} is not a whole number")
    return int(value) if whole else float(value)


def read_around_text(folder: Path, tokenizer: Tokenizer, begin: tuple[int, ...]) -> AroundText:
    """Returns the ids before and behind a text for an embedding: those of the tokenizer's own post-processor, else
    those that tokenizer_config.json asks for by `add_bos_token` and `add_eos_token`.

    Args:
        begin: the ids for `add_bos_token`, see `read_added`.
    """
    found = tokenizer.around
    return AroundText(found.before or begin, found.behind or read_added(folder, tokenizer, "eos"))


def read_added(folder: Path, tokenizer: Tokenizer, which: str) -> tuple[int, ...]:
    """Returns the id, in a tuple, of the "bos" or "eos" token if the model's tokenizer_config.json says that a text
    outside any turn gets it (`add_bos_token`, `add_eos_token`); else ().
    """
    if read_json_if_any(folder / "tokenizer_config.json").get(f"add_{which}_token") is not True:
        return ()
    id = named_id(folder, tokenizer, f"{which}_token")
    return () if id is None else (id,)


def named_id(folder: Path, tokenizer: Tokenizer, name: str) -> int | None:
    """Returns the id of the special token with this name, such as "bos_token"; None if the model's files have none."""
    return tokenizer.id_of(special_tokens(folder).get(name, ""))


def read_stop_ids(folder: Path, tokenizer: Tokenizer, template: ChatTemplate) -> frozenset[int]:
    """Returns the ids of the tokens that end an answer: those that the model's files name, and the one with which the
    template ends a turn.
    """
    found: set[int] = set()
    for file in ("generation_config.json", "config.json"):
        found |= _ids(folder / file)
    if (named := named_id(folder, tokenizer, "eos_token")) is not None:
        found.add(named)
    return frozenset(found | _end_of_turn(tokenizer, template))


def _ids(path: Path) -> set[int]:
    value = read_json_if_any(path).get("eos_token_id")
    many = value if isinstance(value, list) else [] if value is None else [value]
    many = [int(id) if isinstance(id, float) and id.is_integer() else id for id in many]
    if not all(isinstance(id, int) and not isinstance(id, bool) and id >= 0 for id in many):
        raise BadCheckpoint(f"{path} has an eos_token_id that is not a token id")
    return set(many)


def _end_of_turn(tokenizer: Tokenizer, template: ChatTemplate) -> set[int]:
    """Returns the special token right after an answer, in a conversation that has one."""
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": _MARK}]
    try:
        text = template.render(turns, add_generation_prompt=False)
    except BadCheckpoint:  # a template may refuse this chat and take the user's
        return set()
    after = tokenizer.encode(text.rpartition(_MARK)[2][:1000]) if _MARK in text else []
    return {after[0]} & tokenizer.special_ids if after else set()
