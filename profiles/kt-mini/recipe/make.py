"""Make kt-mini in one command: train, measure, release; all that is said is kept in training.log of the model folder.

    python profiles/kt-mini/recipe/make.py --minutes 60
    python profiles/kt-mini/recipe/make.py --minutes 40 --start profiles/kt-mini     # go on from those weights

Options are those of train.py. Nothing is released when a step fails.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from pathlib import Path

RECIPE = Path(__file__).parent
FOLDER = RECIPE.parent
RUN = RECIPE.parents[2] / "build" / "kt-mini"


def main() -> None:
    """Run the steps, each in a process of its own, and keep their output."""
    options = sys.argv[1:]
    RUN.mkdir(parents=True, exist_ok=True)
    steps = [
        ["train.py", "--out", str(RUN), *options],
        ["evaluate.py", str(RUN), "--verbose"],
        ["evaluate.py", str(RUN), "--round", "int4+dense8"],
        ["release.py", str(RUN), str(FOLDER)],
    ]
    log = RUN / "training.log"
    with log.open("w", encoding="utf-8") as kept:

        def say(line: str) -> None:
            for stream in (sys.stdout, kept):
                stream.write(line)
                stream.flush()

        if "--start" in options:
            start = Path(options[options.index("--start") + 1]) / "model.safetensors"
            say(f"start: weights of SHA-256 {hashlib.sha256(start.read_bytes()).hexdigest()}\n")
        for name, *words in steps:
            shown = (w.replace(f"{RECIPE.parents[2]}/", "") for w in (name, *words))
            say(f"$ {' '.join(shown)}\n")
            began = time.time()
            command = [sys.executable, str(RECIPE / name), *words]
            with subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            ) as step:
                for line in step.stdout or ():
                    say(line)
            if step.returncode:
                raise SystemExit(f"{name} failed with {step.returncode}")
            say(f"  {(time.time() - began) / 60:.1f} minutes\n")
    (FOLDER / log.name).write_text(log.read_text(encoding="utf-8"), encoding="utf-8")


if __name__ == "__main__":
    main()
