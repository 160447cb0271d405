"""The form of answers that `kt chat` enforces: the JSON schema in a file, or any JSON object."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ktcli import smallfiles
from ktcli.errors import UsageError

if TYPE_CHECKING:
    from ktcli.answers.grammar.form import Form

FORMATS = ("json",)
_MOST_BYTES = 1 << 20  # of the file; blanks and all


def asked_form(schema: Path | None, format: str | None) -> Form | None:
    """Returns the form that --schema or --format asks for; None without them. It is checked before a model is loaded.

    Raises:
        UsageError: both were given, the file cannot be read, or the schema cannot be used.
    """
    if schema is None and format is None:
        return None
    if schema is not None and format is not None:
        raise UsageError(
            "--schema and --format cannot be used together", hint="leave out one of them"
        )
    from ktcli.answers.grammar.compiler import require_sound
    from ktcli.answers.grammar.form import Form

    if schema is None:
        if format not in FORMATS:
            raise UsageError(f"--format must be {', '.join(FORMATS)}, not {str(format)[:40]!r}")
        return Form.of_object("--format")
    form = Form.of_schema(_text_of(schema), "--schema")
    require_sound(form)
    return form


def _text_of(path: Path) -> str:
    try:
        return smallfiles.read_start(path, _MOST_BYTES).decode()
    except OSError as error:
        raise UsageError(f"--schema: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--schema: {path} is not UTF-8 text (byte {error.start})") from error
