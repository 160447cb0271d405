"""Turn native/include/kt.h into the declarations the Python binding loads.

That header and those it includes are the only place where the C API is written. cffi reads C declarations but
has no preprocessor, so this file is a small one: it follows `#ifdef` and `#include "…"`, drops other includes,
attributes, KT_API and static assertions, and keeps `#define NAME <integer expression>` as a constant. The result is a
plain Python module (cffi's out-of-line ABI mode): no compiler run, no Python ABI.

    python cdef.py include/kt.h ktcli/_native.py build/stamp.c

Library and module carry a number made of all declarations, so that a library of other ones is known (`stamp_of`).
"""

import ast
import os
import re
import sys
from pathlib import Path
from zlib import crc32

COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
INCLUDED = re.compile(r'^#include "([^"]+)"$', re.MULTILINE)
DIRECTIVE = re.compile(r"\s*#\s*(\w+)\s*(.*)")
DROPPED_CALL = re.compile(r"\b(?:(_Static_assert|static_assert)|__attribute__)\s*\(")
INT_SUFFIX = re.compile(r"\b(0[xX][0-9a-fA-F]+|\d+)[uUlL]+\b")

OPERATORS = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.LShift: lambda a, b: a << b,
    ast.BitOr: lambda a, b: a | b,
}


def constant(text: str, known: dict[str, int | None]) -> int | None:
    """The value of an integer expression over the macros `known`, or None where it is not one."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name) and (number := known[node.id]) is not None:
            return number
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise LookupError(ast.dump(node))

    try:
        return value(ast.parse(INT_SUFFIX.sub(r"\1", text.strip()), mode="eval").body)
    except (SyntaxError, LookupError):
        return None


def preprocess(header: str) -> str:
    """The header with its directives followed and only integer constants kept of them."""
    header = COMMENT.sub(" ", header).replace("\\\n", " ")
    known: dict[str, int | None] = {}  # macro -> its value, None where that is no integer
    conditions: list[bool] = []  # of the conditionals that are open here
    kept: list[str] = []
    for line in header.split("\n"):
        found = DIRECTIVE.match(line)
        if found is None:
            if all(conditions):
                kept.append(line)
            continue
        directive, text = found[1], found[2].strip()
        if directive in ("ifdef", "ifndef"):
            conditions.append((text in known) == (directive == "ifdef"))
        elif directive == "else":
            conditions[-1] = not conditions[-1]
        elif directive == "endif":
            conditions.pop()
        elif directive == "define":
            if all(conditions):
                name, _, value = text.partition(" ")
                known[name] = constant(value, known)
                if known[name] is not None:
                    kept.append(f"#define {name} {known[name]}")
        elif directive not in ("include", "pragma"):
            raise SyntaxError(f"the header has a directive this reader does not follow: {line}")
    return "\n".join(kept)


def declarations(header: str) -> str:
    """What cffi's `cdef` takes, out of the text of kt.h."""
    text = re.sub(r"\bKT_API\b", "", preprocess(header))
    while found := DROPPED_CALL.search(text):
        # Strings are skipped as units: the message of an assertion may hold a parenthesis.
        depth, start = 0, found.end() - 1
        for token in re.finditer(r'"(?:\\.|[^"\\])*"|[()]', text[start:]):
            depth += {"(": 1, ")": -1}.get(token[0], 0)
            if depth == 0:
                break
        end = start + token.end()
        if found[1]:
            end = text.index(";", end) + 1
        text = text[: found.start()] + text[end:]
    return re.sub(r"\n\s*\n+", "\n", text).strip() + "\n"


def inlined(header: Path) -> str:
    """The text of a header with the ones beside it in their places; their guards keep each once."""
    text = header.read_text(encoding="utf-8")
    return INCLUDED.sub(lambda found: inlined(header.with_name(found[1])), text)


def stamp_of(declared: str) -> int:
    """The number that tells these declarations from others."""
    return crc32(declared.encode()) & 0x7FFFFFFF


def main(header: Path, target: Path, source: Path) -> None:
    """Writes the module, and the C source of the stamp that both have; each under another name first, so that a reader
    never sees half of it."""
    from cffi import FFI

    declared = declarations(inlined(header))
    stamp = stamp_of(declared)
    ffi = FFI()
    ffi.set_source("ktcli._native", None)
    ffi.cdef(f"{declared}#define KT_API_STAMP {stamp}\n")
    partial = target.with_name(target.name + ".new")
    ffi.emit_python_code(str(partial))
    os.replace(partial, target)
    partial = source.with_name(source.name + ".new")
    partial.write_text(
        f'#include "{header.name}"\n\nint32_t kt_api_stamp(void)\n{{\n    return {stamp};\n}}\n'
    )
    os.replace(partial, source)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: cdef.py HEADER MODULE SOURCE")
    main(*map(Path, sys.argv[1:]))
