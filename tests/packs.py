"""Folders that pass for packs wherever only their manifest is looked at."""

from __future__ import annotations

from pathlib import Path

from ktcli.manifest import PACK, FileRecord, FormatNames, Manifest


def pretend_pack(
    folder: Path,
    experts: str = "int4",
    dense: str = "int8",
    *,
    repository: str = "",
    files: dict[str, bytes] | None = None,
) -> Path:
    """A folder with a manifest and these files, whose hashes are all zeros."""
    folder.mkdir(parents=True)
    records = []
    for name, data in (files or {}).items():
        (folder / name).write_bytes(data)
        records.append(FileRecord(name, len(data), "0" * 64))
    names = FormatNames(experts, dense)
    found = Manifest(tuple(records), repository=repository, formats=names)
    (folder / PACK).write_bytes(found.encode())
    return folder
