"""Parses the text that a user may write for a model; asks no hub, and looks on disk only for names that the user
defined.

qwen3-30b-a3b               a short name of the catalogue
qwen3-30b-a3b@int4-int8     one conversion of it
big                         an alias of any of these (see `aliases`)
Qwen/Qwen3-30B-A3B          a repository on the default hub (Hugging Face)
ms:Qwen/Qwen3-30B-A3B       on ModelScope; hf: says Hugging Face
Qwen/Qwen3-30B-A3B@main     at a revision: branch, tag or commit
org/repo:Q4_K_M             its GGUF files of this quant; org/repo@revision:Q4_K_M
https://huggingface.co/…    the page of a repository, of a revision or of a GGUF file, and modelscope.cn
./folder  /abs  ~/x         a local folder; so is any name that is a folder here and has a slash
./folder@int4-int8          the conversion of it to these formats
model.gguf                  a GGUF file; of a numbered set, any one of its files
ollama:NAME[:TAG]           the GGUF file that Ollama keeps under this name (see `ollama`)
MODEL+ADAPTER               any of these with an adapter of the library (`split_adapter`)
lmstudio:NAME               the folder or GGUF file that LM Studio keeps under this name (see `lmstudio`)
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ktcli.errors import UsageError
from ktcli.ggufname import GGUF, VISION, is_model
from ktcli.records import dataclass
from ktcli.store import aliases, catalog, lmstudio, ollama, places
from ktcli.store.profile import HUBS, REPOSITORY, typed

_PART = places.NAME
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
_QUANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
_QUANT_MARK = "--gguf-"  # between the name of a repository and a quant of it
_ROW = r"(?:UD-)?(?:I?Q[0-9]+(?:_[A-Z0-9]+)*|TQ[0-9]_[0-9]|(?:MX|NV)FP4(?:_MOE)?|BF16|F16|F32)"
_END = rf"(?ai)(?:|.*?[-._])({_ROW})"
_NUMBER = re.compile(r"-[0-9]{5}-of-[0-9]{5}$", re.ASCII)
_HOSTS = {
    "huggingface.co": "hf",
    "hf.co": "hf",
    "hf-mirror.com": "hf",
    "modelscope.cn": "ms",
    "modelscope.ai": "ms",
}
_FORMATS = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
# The formats of a conversion behind the @ of a repository, where a revision may stand, too: no branch is called so.
_PAIR = r"(?:int|nl|mxfp|fp|bf|f)[0-9]+(?:-[a-z0-9]+)*-(?:int|nl|mxfp|fp|bf|f)[0-9]+(?:-[a-z0-9]+)*"


@dataclass(frozen=True, slots=True)
class Reference:
    """A model as named by a user.

    Attributes:
        name: its name in the library: safe as one folder name; empty for a local folder.
        formats: "<experts>-<dense>" of one conversion, for a folder of a conversion made from it; empty: any.
        hub, repository, revision: where it comes from; empty for a name outside the catalogue.
        quant: the quant of the GGUF files that are meant; empty: its safetensors files are.
        folder: a local folder or GGUF file; None otherwise.
        anywhere: whether no hub was named, nor a revision of one, so that another one will do, too.
        stored: the name that finds `folder` again, in another program's store; empty: its path does.
    """

    text: str
    name: str
    formats: str = ""
    hub: str = ""
    repository: str = ""
    revision: str = ""
    quant: str = ""
    folder: Path | None = None
    anywhere: bool = False
    stored: str = ""

    @property
    def lasting(self) -> str:
        """The text that names the same model from every working folder, and whatever becomes of aliases; without the
        formats of a conversion.
        """
        if self.folder is not None:
            return self.stored or str(self.folder)
        if not self.repository or catalog.find(self.name) is not None:
            return self.name
        revision = f"@{self.revision}" if self.revision else ""
        return (
            f"{typed(self.hub, self.repository)}{revision}{f':{self.quant}' if self.quant else ''}"
        )

    @property
    def shown(self) -> str:
        """The name of the model as users type it, such as org/repo:QUANT, without the formats of a conversion."""
        return shown(self.name)

    @property
    def model(self) -> str:
        """The text that names the same model without the formats of a conversion, as `parse` reads it: its library
        name, or the path of its folder or file (its name, if it is in another program's store).
        """
        return self.name if self.folder is None else self.stored or str(self.folder)


def parse(text: str) -> Reference:
    """Returns the parsed form of a model's name: the model's name in the library, its repository or its local folder,
    and the formats of a conversion.

    Raises:
        UsageError: `text` is not a valid name. NotFound, BadCheckpoint: it names a model of another program's store
            that does not exist or cannot be read.
    """
    if not text or "\0" in text or len(text) > 4096:
        raise UsageError("the model name is empty or invalid", hint="kt list --all shows the names")
    model, adapter = split_adapter(text)
    if adapter:
        raise UsageError(
            f"{text} names a model with an adapter, which cannot be used here",
            hint=f"name the model alone: {model}; kt adapter show {adapter} describes the adapter",
        )
    if (page := _page(text)) is not None:
        return _repository(text, *page)
    if is_elsewhere(text):
        return _elsewhere(text)
    hub, colon, rest = text.partition(":")
    if colon and hub in HUBS:
        return _repository(text, hub, rest)
    if (found := _local(text)) is not None:
        return found
    if "/" in text:
        found_there = _repository(text, "hf", text)
        return replace(found_there, anywhere=not found_there.revision)
    return _short(text)


def split_adapter(text: str) -> tuple[str, str]:
    """Returns the names of the model and of the LoRA adapter in "MODEL+ADAPTER", or in an alias of that; the text
    itself and "" if it names no adapter.
    """
    if places.is_name(text) and catalog.find(text) is None:
        target = aliases.target_of(text)
        return split_adapter(target) if "+" in target else (text, "")
    stem, _, adapter = text.rpartition("+")
    is_path = "/" in text and os.path.lexists(_expanded(text))
    return (stem, adapter) if stem and places.is_name(adapter) and not is_path else (text, "")


def is_elsewhere(text: str) -> bool:
    """Returns whether a text names a model in the store of Ollama or LM Studio, existing or not: it begins with
    "ollama:" or "lmstudio:".
    """
    return ollama.is_named(text) or lmstudio.is_named(text)


def repository_named(name: str) -> str:
    """Returns the repository, "org/repo" or "ms:org/repo@revision:QUANT", whose library name is `name`, as `parse`
    reads it; empty if there is none.
    """
    stem, dash, quant = name.rpartition(_QUANT_MARK)
    if dash and (found := repository_named(stem)):
        return f"{found}:{quant}"
    parts = name.split("--")
    candidates = [f"{'/'.join(parts[:2])}{'@' if parts[2:] else ''}{'--'.join(parts[2:])}"]
    if parts[0] in HUBS:
        candidates.insert(0, f"{parts[0]}:{repository_named('--'.join(parts[1:]))}")
    for text in candidates:
        match = re.fullmatch(rf"(?:\w+:)?{_PART}/{_PART}(@.+)?", text)
        if match and parse(text).name == name:
            return text
    return ""


def shown(name: str, formats: str = "") -> str:
    """Returns the name of a model in the library as users type it: org/repo:QUANT@FORMATS; `parse` reads it."""
    typed = "" if name.startswith(places.LOCAL) else repository_named(name)
    return f"{typed or name}@{formats}" if formats else typed or name


def _local(text: str) -> Reference | None:
    """A local folder or GGUF file, alone or with the formats of a conversion; None: the text means neither."""
    if (
        text[0] in "./~"
        or text.lower().endswith(GGUF)
        or (("/" in text or text == "..") and _is_folder(text))
    ):
        path = _expanded(text).absolute()
        stem, _, formats = text.rpartition("@")
        if stem and _FORMATS.fullmatch(formats) and not os.path.lexists(path):
            return Reference(text, "", formats, folder=_expanded(stem).absolute())
        return Reference(text, "", folder=path)
    stem, _, formats = text.rpartition("@")
    if stem.lower().endswith(GGUF) and _FORMATS.fullmatch(formats):
        return Reference(text, "", formats, folder=_expanded(stem).absolute())
    return None


def _elsewhere(text: str) -> Reference:
    """A model in another program's store, alone or with the formats of a conversion."""
    stem, at, formats = text.rpartition("@")
    if not at or not _FORMATS.fullmatch(formats):
        stem, formats = text, ""
    if lmstudio.is_named(stem):
        return Reference(text, "", formats, folder=lmstudio.find(stem))
    found = ollama.find(stem)
    return Reference(text, "", formats, folder=found.file, stored=found.text)


def _short(text: str) -> Reference:
    name, at, formats = text.partition("@")
    if not places.is_name(name) or (at and not _FORMATS.fullmatch(formats)):
        raise UsageError(
            f"{text!r} is not a model name",
            hint="write a short name, org/repo[@revision], or a folder with a slash: ./NAME",
        )
    profile = catalog.find(name)
    if profile is None:
        target = aliases.target_of(name)
        return _meant(text, formats, target) if target else Reference(text, name, formats)
    hub = next(iter(profile.repositories), "")
    repository = profile.repositories.get(hub, "")
    return Reference(text, profile.name, formats, hub, repository, anywhere=bool(hub))


def _meant(text: str, formats: str, target: str) -> Reference:
    """The model that an alias stands for, in other formats where it does not name them itself."""
    found = parse(target)
    if formats and found.formats not in ("", formats):
        raise UsageError(
            f"{text} is invalid: the alias already stands for {target}",
            hint=f"use the model's name: {found.model}@{formats}",
        )
    return replace(found, text=text, formats=formats or found.formats)


def _repository(text: str, hub: str, rest: str) -> Reference:
    stem, at, formats = rest.rpartition("@")
    if at and re.fullmatch(_PAIR, formats):
        return replace(_repository(text, hub, stem), formats=formats)
    rest, colon, quant = rest.partition(":")
    repository, at, revision = rest.partition("@")
    match = re.fullmatch(REPOSITORY, repository)
    if colon and not _QUANT.fullmatch(quant):
        raise UsageError(
            f"{quant[:100]!r} is not the name of a quant",
            hint="write it as in the file names: org/repo:Q4_K_M",
        )
    if match is None or (at and (not _REVISION.fullmatch(revision) or ".." in revision)):
        raise UsageError(
            f"{text!r} is not a repository on {HUBS[hub]}",
            hint="write org/repo or org/repo@revision; a folder is written with a dot: ./org/repo",
        )
    profile = None if revision or quant else catalog.by_repository(hub, repository)
    if profile is not None:
        return Reference(text, profile.name, "", hub, repository)
    # Two dashes cannot begin or end an organisation or repository, so the name can be read back.
    parts = [*match.groups(), *([revision.replace("/", "-")] if revision else [])]
    name = "--".join(parts) + (f"{_QUANT_MARK}{quant}" if quant else "")
    library_name = name if hub == "hf" else f"{hub}--{name}"
    return Reference(text, library_name, "", hub, repository, revision, quant)


def _page(text: str) -> tuple[str, str] | None:
    """The hub that a web page belongs to, and what it shows as `_repository` reads it; None: the text is no page.

    Raises:
        UsageError: a page of somebody else, or one that shows no model.
    """
    scheme, _, rest = text.partition("://")
    if scheme.partition("/")[0] in _HOSTS:  # a page that was copied without its scheme
        rest = text
    elif scheme not in ("http", "https"):
        return None
    address, _, _ = rest.partition("?")
    host, *parts = address.partition("#")[0].rstrip("/").split("/")
    hub = _HOSTS.get(host.lower().removeprefix("www."))
    if hub == "ms" and parts[:1] == ["models"]:
        parts = parts[1:]
    if hub is None or len(parts) < 2 or parts[0] in ("datasets", "spaces"):
        raise UsageError(
            f"{text[:200]!r} is not the web page of a model",
            hint="paste one like https://huggingface.co/org/repo, or write org/repo",
        )
    said = "/".join(parts[:2])
    revision = parts[3] if len(parts) > 3 and parts[2] in ("tree", "blob", "resolve") else ""
    said += f"@{revision}" if revision not in ("", "main", "master") else ""
    file = parts[-1]
    if file.lower().endswith(GGUF) and (quant := quant_of(*parts[2:])):
        said += f":{quant}"
    return hub, said


def quant_of(*parts: str) -> str:
    """Returns the name of the quant, such as Q4_K_M, at the end of a GGUF file's name, or of its folder's; empty:
    neither has one.

    Args:
        parts: the parts of the file's path, its name last.
    """
    if not is_model(parts[-1]):
        return ""
    stem = _NUMBER.sub("", parts[-1][: -len(GGUF)])
    match = re.fullmatch(_END, stem) or (re.fullmatch(_END, parts[-2]) if len(parts) > 1 else None)
    return match[1] if match else ""


def vision_files(names: Iterable[str]) -> tuple[str, ...]:
    """Returns those of the file names, sorted, that are GGUF files with a model's encoder for images or sound."""
    return tuple(sorted(n for n in names if VISION in n.lower() and n.lower().endswith(GGUF)))


def vision_left_out(names: Iterable[str]) -> str:
    """Returns the sentence for the user that vision files among these file names are not used; "": there are none."""
    found = vision_files(names)
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"{found[0]}{more} is left out: kt does not read images or audio" if found else ""


def _is_folder(text: str) -> bool:
    try:
        return _expanded(text).is_dir()
    except OSError:
        return False


def _expanded(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UsageError(f"{text!r} refers to the home folder of an unknown user") from None
