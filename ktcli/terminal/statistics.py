"""The statistics of an answer, as lines for people."""

from __future__ import annotations

from ktcli.engine.request import Stats


def six_lines(stats: Stats) -> str:
    """Returns the statistics of an answer, in the format of ollama and KTransformers; and the number of drafted tokens,
    if any.
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
    """Returns the line below the six: the cached tokens of the prompt, and all of them; and how many of them came from
    stores below memory.
    """
    came = "".join(f", {n} from {name}" for name, n in stats.restored.items())
    return f"{'cached / prompt:':<22}{stats.reused_tokens} / {stats.prompt_tokens} token(s){came}"
