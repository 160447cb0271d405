"""Copy a finished training run into the model folder, without what belongs to the run.

python profiles/kt-mini/recipe/release.py build/kt-mini profiles/kt-mini
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "learned.json",
)
LIMIT_BYTES = 10_000_000


def main(run: Path, folder: Path) -> None:
    """Check the size, then copy."""
    size = (run / "model.safetensors").stat().st_size
    if size > LIMIT_BYTES:
        raise SystemExit(f"model.safetensors has {size} bytes, more than {LIMIT_BYTES}")
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(run / name, folder / name)
    print(f"{folder}: {size} bytes of weights")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
