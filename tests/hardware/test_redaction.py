"""What identifies somebody does not stand in a report, whatever surrounds it; all else does."""

import pytest

from ktcli.hardware.redaction import names_of, redacted

NAMES = names_of(
    {"HF_TOKEN": "s3cret!value", "MY_API_KEY": "abcd", "SHORT_KEY": "x", "EDITOR": "vim"},
    "ada", "box.example.org", "/srv/people/ada",
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("/srv/people/ada/kt is full", "~/kt is full"),
        ("/home/other/kt and /Users/eve", "~/kt and ~"),
        ("ada@box.example.org, box", "USER@HOST, HOST"),
        ("token s3cret!value.", "token TOKEN."),
        ("abcd hf_AbCdEfGh12345", "TOKEN TOKEN"),
        ("https://me:pw@hub/x", "https://hub/x"),
        ("socks5://me:pw@hub/x", "socks5://hub/x"),
        ("adamant boxes, vim x", "adamant boxes, vim x"),
    ],
)
def test_names_are_taken_out(text: str, said: str) -> None:
    assert redacted({"ada": [text, 1, None]}, NAMES) == {"ada": [said, 1, None]}


def test_nothing_known_takes_nothing_out() -> None:
    assert redacted("a / b", names_of({}, "", "", "/")) == "a / b"
