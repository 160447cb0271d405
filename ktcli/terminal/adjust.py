"""Reads and writes settings as a user types them: the lines of `/set`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ktcli.chat.compaction import DROP, STOP
from ktcli.errors import UsageError
from ktcli.sampling import RANGES, SamplingSettings
from ktcli.terminal.screen import Screen, ThoughtsView
from ktcli.text.settings import Settings


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _switch(text: str) -> bool:
    return {"on": True, "yes": True, "true": True, "off": False, "no": False, "false": False}[
        text.lower()
    ]


_SAMPLING: dict[str, Callable[[str], Any]] = {
    "temperature": _number,
    "top-k": int,
    "top-p": _number,
    "min-p": _number,
    "repetition-penalty": _number,
    "seed": int,
    "greedy": _switch,
}
SETTABLE = (*_SAMPLING, "max-tokens", "stop", "thinking", "think-budget", "when-full")
DEFAULT = "default"  # what the model likes or, in a chat with a server, what the server does
OF_SCREEN = ("markdown", "thoughts", "status")  # of how answers are shown
# The value at which each setting of sampling does nothing.
_OFF: dict[str, Any] = {
    "top-k": 0, "top-p": 1.0, "min-p": 0.0, "repetition-penalty": 1.0, "seed": None, "greedy": False
}  # fmt: skip
_WORDS = {
    **{name.replace("_", "-"): words for name, (_, _, words) in RANGES.items()},
    "seed": "a whole number, or off for a new one in each chat",
    "greedy": "on or off",
    "max-tokens": "a whole number, at least 1, or off",
    "stop": "any text, or off for none",
    "thinking": "on, off or default (the model's default)",
    "think-budget": "a whole number of tokens, at least 1, or off",
    "when-full": "drop (leave out the oldest turns) or stop (refuse the question)",
    "markdown": "on or off",
    "thoughts": "folded, shown or hidden",
    "status": "on or off",
}


def changed(settings: Settings, name: str, value: str) -> Settings:
    """Returns a copy of `settings` in which the setting called `name` has the value parsed from the text `value`.

    Raises:
        UsageError: there is no such setting, or it cannot have this value; the hint has the possible ones.
    """
    if name not in SETTABLE:
        raise UsageError(f"there is no setting {name!r}", hint=f"settings: {', '.join(SETTABLE)}")
    off = value in ("", "off", "none")
    key = name.replace("-", "_")
    if settings.stated is not None and name in _SAMPLING and value == DEFAULT:
        return replace(settings, stated=settings.stated - {key})
    try:
        if name == "stop":
            return replace(settings, stops=() if off else (*settings.stops, value))
        if name in ("max-tokens", "think-budget"):
            limit: dict[str, Any] = {key: None if off else int(value)}
            return replace(settings, **limit)
        if name == "thinking":
            return replace(settings, thinking=None if value == DEFAULT else _switch(value))
        if name == "when-full":
            return replace(settings, drops={DROP: True, STOP: False}[value])
        if off and name in _OFF and name != "greedy":
            stated = None if settings.stated is None else settings.stated | {key}
            sampling = replace(settings.sampling, **{key: _OFF[name]})
            return replace(settings, sampling=sampling, stated=stated)
        return settings.sampled(**{key: _SAMPLING[name](value)})
    except (ValueError, KeyError) as error:
        raise UsageError(f"{name} cannot be {value!r}", hint=f"it can be {_WORDS[name]}") from error


def show_otherwise(screen: Screen, name: str, value: str) -> None:
    """Changes how a screen displays answers: sets its Markdown, status line or view of thoughts (`name`) to the value
    parsed from the text `value`.

    Raises:
        UsageError: it cannot have this value; the hint has the possible ones.
    """
    try:
        if name == "markdown":
            screen.markdown = _switch(value)
        elif name == "status":
            screen.status = _switch(value)
        else:
            screen.view = ThoughtsView(value)
    except (ValueError, KeyError) as error:
        raise UsageError(f"{name} cannot be {value!r}", hint=f"it can be {_WORDS[name]}") from error


def silent_seed(sampling: SamplingSettings) -> str:
    """Returns a note that the seed has no effect because sampling is greedy; empty if there is no seed, or sampling is
    not greedy.
    """
    if sampling.seed is None or not sampling.is_greedy:
        return ""
    return "the seed has no effect while the most likely token is always chosen; /set temperature 0.7 changes that"


def shown(settings: Settings, screen: Screen) -> str:
    """Returns all settings of a chat as text, one a line with its value; those of how the screen displays answers are
    included.
    """
    sampling = settings.sampling
    rows = [
        (name, _shown(name, getattr(sampling, key)) if settings.states(key) else "the server's own")
        for name, key in ((name, name.replace("-", "_")) for name in _SAMPLING)
    ]
    rows += [("max-tokens", _limit(settings.max_tokens))]
    rows += [("stop", ", ".join(map(repr, settings.stops)) or "off")]
    thinking = {None: DEFAULT, True: "on", False: "off"}[settings.thinking]
    rows += [("thinking", thinking), ("think-budget", _limit(settings.think_budget))]
    rows += [("when-full", DROP if settings.drops else STOP)]
    rows += [("markdown", _on(screen.markdown)), ("thoughts", screen.view.value)]
    rows += [("status", _on(screen.status))]
    return "\n".join(f"  {name:<20}{words}" for name, words in rows)


def _limit(tokens: int | None) -> str:
    return "off" if tokens is None else str(tokens)


def _on(value: bool) -> str:
    return "on" if value else "off"


def _shown(name: str, value: Any) -> str:
    if name in _OFF and value == _OFF[name]:
        return "off"
    if value is True:
        return "on"
    return f"{value} (greedy)" if name == "temperature" and value == 0 else str(value)
