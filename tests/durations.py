"""Prints where a run's time went, by folder and the dearest tests: python tests/durations.py LOG

LOG is what `pytest --durations=0 -vv` printed; --durations=0 alone leaves out what took less than 5 ms.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

LINE = re.compile(r"^([\d.]+)s (?:call|setup|teardown) +tests/(\S+?)::([^\s\[]+)")
DEAREST = 15


def main() -> None:
    folders: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for line in Path(sys.argv[1]).read_text().splitlines():
        if found := LINE.match(line):
            file, name = Path(found[2]), found[3]
            folders[str(file.parent) if file.parent.name else "(top)"] += float(found[1])
            tests[f"{file}::{name}"] += float(found[1])
    print("| folder | seconds |\n|---|---:|")
    for folder, seconds in folders.most_common():
        print(f"| {folder} | {seconds:.0f} |")
    print(f"| all | {sum(folders.values()):.0f} |\n\n| test | seconds |\n|---|---:|")
    for test, seconds in tests.most_common(DEAREST):
        print(f"| {test} | {seconds:.1f} |")


if __name__ == "__main__":
    main()
