"""The places of the files in which a calibration's results are kept, so that it need not be repeated.

    KT_HOME/importance/NAME@KIND-HASH.safetensors    KIND: text or imatrix; HASH: the first digits of the file's SHA-256

They belong to the model, not to a conversion: each of its formats can be searched by them. They go with the model
(`removal.forget`). What they mean is known to `weights.importance_file`.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from ktcli import config

_DIGITS = 16
_SUFFIX = ".safetensors"
# What a manifest says of a calibration whose result was kept.
_IDENTITY = re.compile(
    r"the (text|imatrix) with .*; importance with SHA-256 ([0-9a-f]{64})", re.ASCII
)


def path_of(model: str, identity: str) -> Path | None:
    """Returns the path, in the user's own library, of the file with the result of a calibration (the importance of each
    column of the weights), which need not exist; None if `identity` does not name a stored result.

    Args:
        model: the name that all conversions of the model share.
        identity: the description of the calibration in the manifest of a conversion.
    """
    found = _IDENTITY.fullmatch(identity)
    if found is None:
        return None
    return _folder() / f"{model}@{found[1]}-{found[2][:_DIGITS]}{_SUFFIX}"


def path_for(model: str, identity: str) -> Path | None:
    """Returns the path of the existing file, in the user's own library or a further library, with the result of a
    calibration (the importance of each column of the weights); None: there is none.
    """
    own = path_of(model, identity)
    return next((path for path in every(model) if own and path.name == own.name), None)


def every(model: str) -> list[Path]:
    """Returns the paths of the files with the results of all calibrations of a model, those of the user's own library
    first, then those of further libraries; in each the newest first.
    """
    found: list[Path] = []
    for folder in (_folder(), *(_folder(library) for library in config.libraries())):
        with contextlib.suppress(OSError):
            here = [path for path in folder.iterdir() if _is_of(path, model)]
            found += sorted(here, key=lambda path: (-path.stat().st_mtime_ns, path.name))
    return found


def forget(model: str) -> None:
    """Deletes the files with the results of a model's calibrations from the user's own library.

    Raises:
        OSError: the system refuses.
    """
    for path in every(model):
        if path.parent == _folder():
            path.unlink(missing_ok=True)


def _folder(library: Path | None = None) -> Path:
    return (library or config.home()) / "importance"


def _is_of(path: Path, model: str) -> bool:
    return path.name.startswith(f"{model}@") and path.suffix == _SUFFIX and path.is_file()
