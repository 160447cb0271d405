"""Opens an adapter's folder, with peft's two files and optionally kt-kernel's pair, as hostile input.

    adapter_config.json, adapter_model.safetensors      peft
    fused_expert_lora.safetensors                       kt-kernel: the factors of all experts of each layer
    kt_adapter_manifest.json                            kt-kernel: sizes and hashes of the others; checked where it is

Opening reads the config and the headers, and compares every shape with the model's before any number is read. Pickles
are never opened.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ktcli import smallfiles
from ktcli.adapters.adapter import Adapter
from ktcli.adapters.factors import hash_of
from ktcli.adapters.pairs import pair_up
from ktcli.adapters.settings import CONFIG, MAX_CONFIG_BYTES, AdapterSettings, parse_settings
from ktcli.adapters.targets import Targets
from ktcli.errors import BadCheckpoint, NotFound
from ktcli.models import Model
from ktcli.weights.documents import inside
from ktcli.weights.files import OpenFiles
from ktcli.weights.header import is_regular, read_bounded, read_header
from ktcli.weights.storage import Part

WEIGHTS = "adapter_model.safetensors"
EXPERTS = "fused_expert_lora.safetensors"
SEALS = "kt_adapter_manifest.json"
FILES = (CONFIG, WEIGHTS, EXPERTS, SEALS)
_MAX_SEALS_BYTES = 64 << 20  # it lists each tensor
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
HINT = (
    "an adapter's folder has adapter_config.json and adapter_model.safetensors, as peft saves them"
)


def read_settings(folder: Path) -> AdapterSettings:
    """Returns the settings (rank, alpha, targets …) in the adapter_config.json of a LoRA adapter's folder.

    Raises:
        NotFound: there is no such folder. BadCheckpoint: the folder has no adapter, or one of a kind that kt does not
            read.
    """
    if not folder.is_dir():
        raise NotFound(f"{str(folder)[:300]} is not a folder", hint=HINT)
    if not is_regular(inside(folder, CONFIG)):
        raise BadCheckpoint(f"{folder} contains no {CONFIG}", hint=HINT)
    return parse_settings(read_bounded(inside(folder, CONFIG), MAX_CONFIG_BYTES))


def files_of(folder: Path) -> tuple[str, ...]:
    """Returns the names of an adapter's files in `folder`: those of FILES that are there, in that order; always with
    the weights.

    Raises:
        BadCheckpoint: its weights are not there, or only as a pickle.
    """
    found = tuple(name for name in FILES if is_regular(inside(folder, name)))
    if WEIGHTS in found:
        return found
    pickle = next((f.name for f in sorted(folder.glob("adapter_model*.bin"))), "")
    if pickle:
        raise BadCheckpoint(
            f"{folder} contains only {pickle[:100]}, a pickle, which can run code when it is read",
            hint="save it again with peft: save_pretrained(folder, safe_serialization=True)",
        )
    if shards := sorted(folder.glob("adapter_model-*.safetensors")):
        raise BadCheckpoint(
            f"{folder} contains {shards[0].name[:100]}; kt reads only adapters in one file, {WEIGHTS}",
            hint="save it again with peft, or as one file",
        )
    raise BadCheckpoint(f"{folder} contains no {WEIGHTS}", hint=HINT)


def open_adapter(folder: Path, model: Model, hashes: Mapping[str, str] | None = None) -> Adapter:
    """Returns the LoRA adapter in a folder, its files open, checked against the model that it is for; the caller closes
    it.

    Args:
        hashes: the SHA-256 of files that is known already, by name; other files are hashed when `digest` is read, or
            at once if kt-kernel's manifest lists them.
    Raises:
        NotFound: there is no such folder.
        BadCheckpoint: the adapter is damaged, hostile, of a kind that kt does not read, or of another model.
    """
    settings = read_settings(folder)
    names, known = files_of(folder), hashes or {}
    if SEALS in names:
        _check_seals(folder, names, settings, known)
    parts = _parts(folder, WEIGHTS)
    fused = _parts(folder, EXPERTS) if EXPERTS in names else {}
    targets = Targets(model)
    pairs, gains, notes = pair_up(settings, targets, parts, fused)
    weights = [name for name in (WEIGHTS, EXPERTS) if name in names]
    files = OpenFiles({name: inside(folder, name) for name in weights}, HINT)
    return Adapter(settings, targets.tensors, pairs, gains, files, folder, names, notes, known)


def _parts(folder: Path, file: str) -> dict[str, Part]:
    """The tensors of one file by name."""
    entries = read_header(inside(folder, file)).entries
    return {name: Part(name, file, entry) for name, entry in entries.items()}


# --- kt-kernel's manifest --------------------------------------------------------------------------


def _check_seals(
    folder: Path, names: tuple[str, ...], settings: AdapterSettings, known: Mapping[str, str]
) -> None:
    """Compares the files with kt-kernel's manifest, and the manifest's rank and alpha with the config's.

    Raises:
        BadCheckpoint: a file is missing or was changed, or the writing of the folder was interrupted.
    """
    try:
        data = read_bounded(inside(folder, SEALS), _MAX_SEALS_BYTES)
        document = smallfiles.json_object(data)
    except ValueError as error:
        raise BadCheckpoint(f"{SEALS} {error}") from None
    if document.get("status") != "ready":
        raise BadCheckpoint(
            f"{SEALS}: status is {str(document.get('status'))[:40]!r}, not 'ready'",
            hint="the folder was not written completely: save the adapter again",
        )
    artifacts = document.get("artifacts")
    if not isinstance(artifacts, Mapping):
        raise BadCheckpoint(f"{SEALS} lists no artifacts")
    for name, record in artifacts.items():
        _check_seal(folder, str(name), record, known)
    if EXPERTS in names and EXPERTS not in artifacts:
        raise BadCheckpoint(f"{SEALS} does not list {EXPERTS}, which is in the folder")
    said = document.get("lora")
    if isinstance(said, Mapping):
        for field, own in (("rank", settings.rank), ("alpha", settings.alpha)):
            if said.get(field, own) != own:
                raise BadCheckpoint(
                    f"{SEALS}: lora.{field} is {str(said[field])[:40]}, but {CONFIG} says {own:g}"
                )


def _check_seal(folder: Path, name: str, record: Any, known: Mapping[str, str]) -> None:
    """Compares one file with its record."""
    if name not in (CONFIG, WEIGHTS, EXPERTS):
        raise BadCheckpoint(f"{SEALS} lists {name[:100]!r}, which does not belong to an adapter")
    size, digest = (
        (record.get(key) for key in ("size", "sha256"))
        if isinstance(record, Mapping)
        else (None, None)
    )
    if type(size) is not int or not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise BadCheckpoint(f"{SEALS} gives {name} an invalid size or hash")
    path = inside(folder, name)
    if not is_regular(path):
        raise BadCheckpoint(f"{SEALS} lists {name}, which is missing from {folder}")
    if path.stat().st_size != size:
        raise BadCheckpoint(f"{name} has {path.stat().st_size} bytes, but {SEALS} says {size}")
    if (known.get(name) or hash_of(path)) != digest:
        raise BadCheckpoint(
            f"the checksum of {name} differs from the one in {SEALS}",
            hint="copy or save the adapter again",
        )
