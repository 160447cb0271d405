"""The formats of rows: detected in each file's first row, then required of every other row.

alpaca      instruction, input, output, and perhaps system and history
sharegpt    conversations, a list of {from, value}, and perhaps system and tools
openai      messages, a list of {role, content}, and perhaps tools
completion  prompt and completion, two texts or two lists of messages
text        text
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ktcli.records import dataclass
from ktcli.samples.columns import USUAL_COLUMNS, USUAL_TAGS, Columns, Tags
from ktcli.samples.conversation import Message, TrainedConversation, TrainedText
from ktcli.samples.messages import list_of, of_openai, of_sharegpt, parsed, text_of
from ktcli.samples.rows import DataRow
from ktcli.samples.sample import BadData
from ktcli.samples.source import DataSource

Content = TrainedConversation | TrainedText
_PREFERENCES = ("chosen", "rejected")
_OPENAI_TAGS = ("role", "content", "user", "assistant")
_NOT_TEXT = ("images", "image", "videos", "audios")


@dataclass(frozen=True, slots=True)
class RowFormat:
    """A format of rows.

    Attributes:
        needs: the columns without which a row is not of it.
        read: makes a row's content; its arguments are the row's values, the format, and the place of the row.
        columns, tags: the names in this file.
    """

    name: str
    needs: tuple[str, ...]
    read: Callable[[Mapping[str, Any], RowFormat, str], Content]
    columns: Columns = USUAL_COLUMNS
    tags: Tags = USUAL_TAGS

    def fits(self, values: Mapping[str, Any]) -> bool:
        """Returns whether a row has values in all columns that this format needs."""
        return all(values.get(name) is not None for name in self.needs)


def format_of(source: DataSource, row: DataRow) -> RowFormat:
    """Returns the format of the rows of a data file: the one in its settings, else that of its first row, `row`.

    Raises:
        BadData: the row is of no format that kt knows.
    """
    found = _said(source, row.values) or _seen(row.values)
    if found is None:
        _require_answers(row)
        keys = ", ".join(list(row.values)[:8])[:200]
        what = f"the keys {keys} do" if keys else "an empty row does"
        raise BadData(
            f"{row.where}: {what} not belong to a format that kt knows",
            hint="use the keys instruction and output; conversations; messages; prompt and completion; or text",
        )
    return found


def content_of(row: DataRow, format: RowFormat) -> Content:
    """Returns the conversation or the text in a row of a data file.

    Raises:
        BadData: the row is not in the format of its file, or a value in it is invalid.
    """
    _require_answers(row)
    if media := next((name for name in _NOT_TEXT if row.values.get(name)), None):
        raise BadData(f"{row.where}: the row has {media}, but kt trains on text only")
    other = None if format.fits(row.values) else _seen(row.values)
    if other or not all(name in row.values for name in format.needs):
        has = f"this row is in the {other.name} format" if other else "this row lacks these keys"
        raise BadData(
            f"{row.where}: the file's first row is in the {format.name} format"
            f" ({', '.join(format.needs)}), but {has}",
            hint="put rows of different formats into separate files, and name all of them",
        )
    return format.read(row.values, format, row.where)


def _require_answers(row: DataRow) -> None:
    """Checks that a row is not a pair of answers of which one is better."""
    if all(row.values.get(name) is not None for name in _PREFERENCES):
        raise BadData(
            f"{row.where}: the row has chosen and rejected answers, but kt trains on answers, not on preferences",
            hint="to train on the chosen ones, rename that key to output or messages",
        )


def _seen(values: Mapping[str, Any]) -> RowFormat | None:
    """Returns the format of a row by its keys."""
    for name in ("messages", "conversations"):
        if values.get(name) is not None:
            return _of_list(name, values[name])
    return next((each for each in _BY_KEYS if each.fits(values)), None)


def _of_list(name: str, value: Any) -> RowFormat:
    """Returns the format of a list of messages: what its messages are called says which."""
    try:
        found = parsed(value, name)
    except BadData:
        found = None
    first = found[0] if isinstance(found, list) and found else None
    keys = first if isinstance(first, Mapping) else ()
    is_openai = "role" in keys or name == "messages"
    chosen = _OPENAI if is_openai and "from" not in keys else _SHAREGPT
    return replace(chosen, needs=(name,), columns=Columns(messages=name))


def _said(source: DataSource, values: Mapping[str, Any]) -> RowFormat | None:
    """Returns the format that a `dataset_info.json` says a source has."""
    columns, tags = source.columns, source.tags
    if source.formatting is None:
        name = columns.messages
        return replace(_of_list(name, values.get(name)), columns=columns) if name else None
    if source.formatting == "alpaca":
        if columns.prompt and columns.response is None and "output" not in values:
            return replace(_TEXT, needs=(columns.prompt,))  # as LLaMA-Factory names texts
        needs = (columns.prompt or "instruction", columns.response or "output")
        return replace(_ALPACA, needs=needs, columns=columns)
    if source.formatting == "openai":
        return replace(_OPENAI, needs=(columns.messages or "messages",), columns=columns)
    named = (columns.messages or "conversations",)
    if (tags.role_tag, tags.content_tag, tags.user_tag, tags.assistant_tag) == _OPENAI_TAGS:
        return replace(_OPENAI, needs=named, columns=columns)  # it may have calls as well
    return replace(_SHAREGPT, needs=named, columns=columns, tags=tags)


# --- one function each ------------------------------------------------------------------------------


def _alpaca(values: Mapping[str, Any], format: RowFormat, where: str) -> Content:
    names = format.columns

    def text(name: str) -> str:
        return text_of(values.get(name), f"{where}: {name}")

    messages: list[Message] = []
    if system := text(names.system or "system"):
        messages.append(_says("system", system))
    column = names.history or "history"
    for at, pair in enumerate(list_of(values.get(column), f"{where}: {column}")):
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadData(f"{where}: {column}[{at}] is not a pair of a question and an answer")
        asked, said = (text_of(each, f"{where}: {column}[{at}]") for each in pair)
        messages += [_says("user", asked), _says("assistant", said)]
    told = [text(names.prompt or "instruction"), text(names.query or "input")]
    messages.append(_says("user", "\n".join(each for each in told if each)))
    messages.append(_says("assistant", text(names.response or "output")))
    return _conversation(messages)


def _sharegpt(values: Mapping[str, Any], format: RowFormat, where: str) -> Content:
    names = format.columns
    said, system = values.get(format.needs[0]), values.get(names.system or "system")
    return of_sharegpt(said, format.tags, system, values.get(names.tools or "tools"), where)


def _openai(values: Mapping[str, Any], format: RowFormat, where: str) -> Content:
    names = format.columns
    return of_openai(values.get(format.needs[0]), values.get(names.tools or "tools"), where)


def _completion(values: Mapping[str, Any], format: RowFormat, where: str) -> Content:
    prompt, completion = values["prompt"], values["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        whole = of_openai([*prompt, *completion], values.get("tools"), where)
        behind = (False,) * len(prompt) + whole.trained[len(prompt) :]
        return replace(whole, trained=behind)
    asked = text_of(prompt, f"{where}: prompt")
    said = text_of(completion, f"{where}: completion")
    return _conversation([_says("user", asked), _says("assistant", said)])


def _text(values: Mapping[str, Any], format: RowFormat, where: str) -> Content:
    [name] = format.needs
    return TrainedText(text_of(values[name], f"{where}: {name}"))


def _says(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _conversation(messages: list[Message]) -> TrainedConversation:
    trained = tuple(each["role"] == "assistant" for each in messages)
    return TrainedConversation(tuple(messages), trained)


_OPENAI = RowFormat("openai", ("messages",), _openai)
_SHAREGPT = RowFormat("sharegpt", ("conversations",), _sharegpt)
_ALPACA = RowFormat("alpaca", ("instruction", "output"), _alpaca)
_TEXT = RowFormat("text", ("text",), _text)
_BY_KEYS = (RowFormat("completion", ("prompt", "completion"), _completion), _ALPACA, _TEXT)
