"""Finds models in Ollama's store by their names: `ollama:NAME[:TAG]`. Files are used where they lie, and never changed.

    MODELS/manifests/registry.ollama.ai/library/NAME/TAG      JSON: {"layers": [{"mediaType", "digest", "size"}, …]}
    MODELS/manifests/HOST/NAMESPACE/NAME/TAG                  of other users and registries, such as hf.co
    MODELS/blobs/sha256-HEX                                   a layer: the GGUF file, the system text, the parameters

MODELS is $OLLAMA_MODELS, else ~/.ollama/models, else that of the service that Ollama's installer sets up. Source:
ollama's docs/faq (where models are stored) and types/model/name.go, server/internal/manifest/manifest.go. Manifests are
read as if somebody hostile had written them: a name or a digest never leads out of the store by itself.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from ktcli import smallfiles
from ktcli.errors import BadCheckpoint, NotFound, UsageError, gib
from ktcli.records import dataclass
from ktcli.store import modelfile
from ktcli.store.preset import NOTHING, Preset

PREFIX = "ollama:"
_SERVICE = Path("/usr/share/ollama/.ollama/models")
_HOST, _NAMESPACE, _TAG = "registry.ollama.ai", "library", "latest"
_PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
_NAME = rf"(?:(?:(?P<host>{_PART}(?::[0-9]{{1,5}})?)/)?(?P<space>{_PART})/)?(?P<name>{_PART})(?::(?P<tag>{_PART}))?"
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_LAYER = "application/vnd.ollama.image."
_MODEL, _SYSTEM, _PARAMETERS = "model", "system", "params"
_UNUSED = {
    "projector": "its projector, which reads images or audio, is not used",
    "template": "its template is not used; the GGUF file's own is",
    "messages": "its messages are not used",
}
_REFUSED = {"adapter": "has an adapter", "tensor": "is stored as safetensors"}
_MANIFEST_BYTES, _TEXT_BYTES = 1 << 20, 1 << 18
_MOST_LAYERS, _MOST_MODELS = 1000, 10_000
_NEAREST = 3


@dataclass(frozen=True, slots=True)
class OllamaModel:
    """A model in Ollama's store.

    Attributes:
        text: the name that finds it again, `ollama:NAME` or `ollama:NAME:TAG`.
        file: its GGUF file, a blob.
        preset: what its system text and its parameters set.
        unused: a sentence on each part of it that is not used.
    """

    text: str
    file: Path
    preset: Preset = NOTHING
    unused: tuple[str, ...] = ()


def is_named(text: str) -> bool:
    """Returns whether a text names a model in Ollama's store, existing or not: it begins with "ollama:"."""
    return text.lower().startswith(PREFIX)


def find(text: str) -> OllamaModel:
    """Returns the model in Ollama's store that a name "ollama:NAME" or "ollama:NAME:TAG" means.

    Raises:
        UsageError: `text` is not valid. NotFound: there is no such model; the hint names some.
        BadCheckpoint: the model's manifest, or a file that it names, is damaged or hostile, or of a kind that kt cannot
            use.
    """
    said = text[len(PREFIX) :]
    match = re.fullmatch(_NAME, said)
    if match is None:
        raise UsageError(
            f"{said[:120]!r} is not the name of a model in Ollama",
            hint="write it as ollama list shows it: ollama:NAME or ollama:NAME:TAG",
        )
    place = (match["host"] or _HOST, match["space"] or _NAMESPACE, match["name"])
    tag = match["tag"] or _TAG
    stem = said if match["tag"] is None else said[: match.start("tag") - 1]
    for models in _places():
        path = _cased(models / "manifests", (*place, tag))
        if path is not None:
            known = f"{PREFIX}{stem}" if tag.lower() == _TAG else f"{PREFIX}{stem}:{path.name}"
            return _stored(known, models, path)
    raise _absent(said)


def names() -> Iterator[str]:
    """Yields the names of the models in Ollama's store, "ollama:NAME" or "ollama:NAME:TAG", at most 10,000 a folder."""
    for models in _places():
        top = models / "manifests"
        for path in islice(_below(top, 4), _MOST_MODELS):
            host, space, name, tag = path.relative_to(top).parts
            known = "" if host == _HOST else f"{host}/"
            known += "" if not known and space == _NAMESPACE else f"{space}/"
            text = f"{known}{name}" if tag == _TAG else f"{known}{name}:{tag}"
            if re.fullmatch(_NAME, text):
                yield f"{PREFIX}{text}"


def _places() -> list[Path]:
    """The folders of models that there may be: the one that is named, else those where Ollama puts them."""
    said = os.environ.get("OLLAMA_MODELS", "").strip()
    if said:
        return [Path(os.path.expanduser(said)).absolute()]
    return [Path(os.path.expanduser("~/.ollama/models")), _SERVICE]


def _below(folder: Path, depth: int) -> Iterator[Path]:
    """The files so many levels below a folder, by name; none where it cannot be read."""
    try:
        items = sorted(os.listdir(folder))
    except OSError:
        return
    for path in (folder / name for name in items):
        if depth > 1:
            yield from _below(path, depth - 1)
        elif path.is_file():
            yield path


def _cased(folder: Path, parts: tuple[str, ...]) -> Path | None:
    """The file at a path below a folder, upper or lower case; None: there is none."""
    for part in parts:
        exact = folder / part
        try:
            if not exact.exists():
                near = (each for each in os.listdir(folder) if each.lower() == part.lower())
                exact = folder / next(near, part)
        except OSError:
            return None
        folder = exact
    try:
        return folder if folder.is_file() else None
    except OSError:
        return None


def _absent(said: str) -> NotFound:
    words = said.lower().rpartition("/")[2].partition(":")[0]
    known = list(names())
    near = [each for each in known if words in each.lower()] or known
    more = f" and {len(near) - _NEAREST} more" if len(near) > _NEAREST else ""
    where = " and ".join(str(each) for each in _places())
    hint = (
        f"there are: {', '.join(near[:_NEAREST])}{more}"
        if near
        else f"kt looks in {where}; OLLAMA_MODELS names another folder"
    )
    return NotFound(f"there is no model {said[:120]!r} in Ollama's store", hint=hint)


# --- one model --------------------------------------------------------------------------------


def _stored(text: str, models: Path, manifest: Path) -> OllamaModel:
    file, values, unused = None, dict[str, Any](), list[str]()
    for kind, layer in _layers(text, manifest):
        if kind in _REFUSED:
            raise BadCheckpoint(
                f"{text} {_REFUSED[kind]}, which kt cannot use",
                hint="pull the model from a hub instead: kt search WORD --hub",
            )
        if kind == _MODEL and file is not None:
            raise BadCheckpoint(f"{text} has several model files, which kt cannot use")
        if kind == _MODEL:
            file = _blob(text, models, layer)
        elif kind in (_SYSTEM, _PARAMETERS):
            found, left = _read(text, models, layer, kind)
            values |= found
            unused += left
        elif kind in _UNUSED:
            unused.append(_UNUSED[kind])
    if file is None:
        raise BadCheckpoint(f"{text} has no model file", hint=f"ollama pull {text[len(PREFIX) :]}")
    return OllamaModel(text, file, Preset.of(values), tuple(dict.fromkeys(unused)))


def _layers(text: str, manifest: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the kind of each layer, the word behind Ollama's prefix, and the layer."""
    try:
        document = smallfiles.json_object(smallfiles.read_bounded(manifest, _MANIFEST_BYTES))
    except OSError as error:
        raise _damaged(text, manifest, f"cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise _damaged(text, manifest, str(error)) from error
    layers = document.get("layers")
    if not isinstance(layers, list) or len(layers) > _MOST_LAYERS:
        raise _damaged(text, manifest, f"has no list of at most {_MOST_LAYERS} layers")
    for layer in layers:
        kind = layer.get("mediaType") if isinstance(layer, dict) else None
        if not isinstance(kind, str):
            raise _damaged(text, manifest, "has a layer without a media type")
        if kind.startswith(_LAYER):
            yield kind.removeprefix(_LAYER).partition(";")[0].strip(), layer


def _blob(text: str, models: Path, layer: Mapping[str, Any]) -> Path:
    """The file of a layer: plain, readable, and of the size that the manifest says; what it is called is its hash."""
    digest, size = layer.get("digest"), layer.get("size")
    match = _DIGEST.fullmatch(digest) if isinstance(digest, str) else None
    if match is None:
        raise BadCheckpoint(f"{text} has a layer whose digest is {str(digest)[:80]!r}, not SHA-256")
    path, again = models / "blobs" / f"sha256-{match[1]}", f"ollama pull {text[len(PREFIX) :]}"
    try:
        status = path.stat()
    except OSError as error:
        raise NotFound(f"cannot read {path} of {text}: {error.strerror}", hint=again) from error
    if not stat.S_ISREG(status.st_mode):
        raise BadCheckpoint(f"{path} of {text} is not a plain file", hint=again)
    if not os.access(path, os.R_OK):
        raise NotFound(
            f"you may not read {path} of {text}",
            hint=f"sudo chmod o+r {path}, or run kt as a member of its group",
        )
    if isinstance(size, int) and not isinstance(size, bool) and size != status.st_size:
        said = f"{path} of {text} is {gib(status.st_size)}, but its manifest says {gib(size)}"
        raise BadCheckpoint(said, hint=again)
    return path


def _read(
    text: str, models: Path, layer: Mapping[str, Any], kind: str
) -> tuple[dict[str, Any], list[str]]:
    """What a layer with a system text or with parameters sets, and sentences on what is not used of it."""
    path = _blob(text, models, layer)
    try:
        data = smallfiles.read_bounded(path, _TEXT_BYTES)
        if kind == _SYSTEM:
            return modelfile.usable({"system": data.decode("utf-8").strip() or None})
        return modelfile.usable_parameters(smallfiles.json_object(data))
    except OSError as error:
        raise _damaged(text, path, f"cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise _damaged(text, path, str(error)) from error


def _damaged(text: str, path: Path, what: str) -> BadCheckpoint:
    return BadCheckpoint(f"{path} of {text} {what}", hint=f"ollama pull {text[len(PREFIX) :]}")
