"""The small files next to the weights that a pack includes: configuration, tokenizer, template, licence."""

from __future__ import annotations

import re

# The files that a pack takes over from the checkpoint as they are, with the largest size accepted of each, in bytes.
EXTRAS: tuple[tuple[re.Pattern[str], int], ...] = tuple(
    (re.compile(pattern), limit)
    for pattern, limit in (
        (r"config\.json", 1_000_000),
        (r"generation_config\.json", 1_000_000),
        (r"tokenizer\.json", 100_000_000),
        (r"tokenizer_config\.json", 20_000_000),
        (r"special_tokens_map\.json", 1_000_000),
        (r"chat_template\.jinja", 1_000_000),
        (r"[A-Za-z0-9_.-]{1,60}\.tiktoken", 100_000_000),
        (r"tiktoken\.model", 100_000_000),
        (r"tokenizer\.model", 64_000_000),
        (r"LICENSE[A-Za-z0-9_.-]{0,40}", 1_000_000),
    )
)


def extra_limit(name: str) -> int:
    """Returns the maximal size in bytes of a small file called `name` in a pack; 0: a pack does not contain such a
    file."""
    return next((limit for pattern, limit in EXTRAS if pattern.fullmatch(name)), 0)
