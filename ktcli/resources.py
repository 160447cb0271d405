"""Finds the files that ship with kt: profiles, the built-in model, the native library.

In a wheel they are installed inside the package. In an editable install the package is the source
folder: the library is built into it, and `profiles/` lies beside it in the repository root. Nothing
else may guess such a path.
"""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def data_path(*parts: str) -> Path:
    """Returns the path of a shipped file or folder, e.g. `data_path("profiles", "kt-mini")`.

    Raises:
        FileNotFoundError: neither the package nor the repository it lies in has it.
    """
    inside = PACKAGE.joinpath(*parts)
    if inside.exists():
        return inside
    # Only a source tree has this file beside the package: another package's `profiles` folder in
    # site-packages must not be taken for ours.
    if (PACKAGE.parent / "pyproject.toml").is_file():
        beside = PACKAGE.parent.joinpath(*parts)
        if beside.exists():
            return beside
    raise FileNotFoundError(
        f"{inside} is missing: this installation is incomplete, install ktcli again"
    )
