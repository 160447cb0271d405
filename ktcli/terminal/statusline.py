"""The statistics of an answer for people: the dim line below it (its tokens and speed, what was read before it, and how
full the context is), and the lines that are asked for.
"""

from __future__ import annotations

from ktcli.engine.request import Stats
from ktcli.errors import counted

_BAR = 10  # characters
_IN_ASCII = str.maketrans("█░·▸…", "#-|>.")
_FULL_SHARE = 0.8  # of the context, from which a word is said about it


def status_line(stats: Stats, used: int, context: int | None, columns: int) -> str:
    """Returns the line below an answer (its tokens, speed, use of the context), with as many parts as fit into
    `columns`.

    Args:
        used: the tokens in the context.
        context: the tokens that it can hold; None: not known.
    """
    parts = [_answer(stats), *_reading(stats), *_context(used, context)]
    line = parts[0]
    for part in parts[1:]:
        if len(line) + 3 + len(part) < columns:
            line = f"{line} · {part}"
    return line


def in_ascii(line: str) -> str:
    """Returns one of kt's own lines with its characters replaced by ASCII, for a terminal that supports no others."""
    return line.translate(_IN_ASCII)


def nearly_full(before: int, used: int, context: int | None) -> str:
    """Returns a warning for the answer with which the tokens in the context reach 80 % of it; empty for any other
    answer, or if the size of the context is not known.

    Args:
        before, used: the tokens in the context before and after the answer.
        context: the tokens that it can hold; None: not known.
    """
    if context is None:
        return ""
    full = _FULL_SHARE * context
    if not before < full <= used:
        return ""
    left = max(0, context - used)
    return (
        f"(the context is {100 * used // context} % full, {left:,} tokens left: /compact makes room,"
        " /clear starts over)"
    )


def time_left(seconds: float, done: int, total: int) -> str:
    """Returns the time until a prompt is read, as text ("12 s left"), at the speed of its first `done` tokens, read in
    `seconds`; empty before the first token or second.
    """
    if done <= 0 or seconds < 1:
        return ""
    left = round(seconds * (total - done) / done)
    minutes, rest = divmod(left, 60)
    return f"{minutes} min {rest} s left" if minutes else f"{rest} s left"


def _answer(stats: Stats) -> str:
    tokens = counted(stats.tokens, "token")
    return f"{tokens}, {_rate(stats.tokens, stats.eval_s)}" if stats.eval_s > 0 else tokens


def _reading(stats: Stats) -> list[str]:
    if not stats.prefilled_tokens:
        return []
    cached = f", {stats.reused_tokens:,} cached" if stats.reused_tokens else ""
    return [f"read {stats.prefilled_tokens:,} in {stats.prompt_s:.1f} s{cached}"]


def _context(used: int, context: int | None) -> list[str]:
    if context is None:
        return []
    full = min(_BAR, -(-_BAR * used // context))
    return [f"context {'█' * full}{'░' * (_BAR - full)} {100 * used // context} %"]


def _rate(count: int, seconds: float) -> str:
    rate = count / seconds
    return f"{rate:.1f} tok/s" if rate < 100 else f"{rate:,.0f} tok/s"


def six_lines(stats: Stats) -> str:
    """Returns the statistics of an answer as text, in the format of ollama and KTransformers: counts, seconds and rates
    of prompt and answer; below them the number of drafted tokens, if any.
    """

    def rate(count: int, seconds: float) -> float:
        return count / seconds if seconds > 0 else 0.0

    rows = [
        ("prompt eval count:", f"{stats.prefilled_tokens} token(s)"),
        ("prompt eval duration:", f"{stats.prompt_s:.9f}s"),
        ("prompt eval rate:", f"{rate(stats.prefilled_tokens, stats.prompt_s):.2f} tokens/s"),
        ("eval count:", f"{stats.tokens} token(s)"),
        ("eval duration:", f"{stats.eval_s:.9f}s"),
        ("eval rate:", f"{rate(stats.tokens, stats.eval_s):.2f} tokens/s"),
    ]
    if stats.drafted:
        words = f"{stats.drafted} drafted, {stats.accepted} accepted"
        rows.append(("draft:", f"{words}, {stats.tokens_per_step:.2f} tokens/step"))
    return "\n".join(f"{name:<22}{value}" for name, value in rows)


def cached_line(stats: Stats) -> str:
    """Returns the line of statistics about the cache: the tokens of the prompt that were cached, all its tokens, and
    how many came from each store below memory.
    """
    came = "".join(f", {n} from {name}" for name, n in stats.restored.items())
    return f"{'cached / prompt:':<22}{stats.reused_tokens} / {stats.prompt_tokens} token(s){came}"
