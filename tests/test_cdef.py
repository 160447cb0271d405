"""The reader of kt.h: what it drops, what it keeps, and that it refuses what it cannot follow."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

NATIVE = Path(__file__).resolve().parent.parent / "native"


def load_cdef() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cdef", NATIVE / "cdef.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


cdef = load_cdef()

HEADER = r"""
/* A comment with a # and
 * #define KT_NOT 1 inside. */
#ifndef KT_H
#define KT_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#else
typedef int kt_plain;
#endif
#define KT_API __attribute__((visibility("default")))
#define KT_COUNT 0x10u
#define KT_BOTH (KT_COUNT | (1u << 3)) // 24
#define KT_MINUS -1
#define KT_SQUARE(x) ((x) * (x))
static_assert(sizeof(int) == 4, "int (\"four\") bytes)");
typedef struct kt_x kt_x;
struct kt_point { int32_t x; } __attribute__((aligned(4)));
KT_API int kt_do(kt_x *x, const uint16_t *restrict ids,
                 size_t n);
#ifdef __cplusplus
}
#endif
#endif
"""


def test_header_becomes_declarations():
    assert cdef.declarations(HEADER).split("\n") == [
        "typedef int kt_plain;",
        "#define KT_COUNT 16",
        "#define KT_BOTH 24",
        "#define KT_MINUS -1",
        "typedef struct kt_x kt_x;",
        "struct kt_point { int32_t x; } ;",
        " int kt_do(kt_x *x, const uint16_t *restrict ids,",
        "                 size_t n);",
        "",
    ]


def test_unknown_directive_is_refused():
    with pytest.raises(SyntaxError, match="#if KT_LEVEL > 2"):
        cdef.declarations("#if KT_LEVEL > 2\n#endif\n")


def test_headers_in_quotes_are_read_once(tmp_path: Path):
    for name, text in {
        "a.h": '#include <stdint.h>\n#include "b.h"\n#include "c.h"\ntypedef int kt_a;',
        "b.h": "#ifndef KT_B\n#define KT_B\ntypedef int kt_b;\n#endif\n",
        "c.h": '#include "b.h"\ntypedef kt_b kt_c;\n',
    }.items():
        (tmp_path / name).write_text(text)
    found = cdef.declarations(cdef.inlined(tmp_path / "a.h"))
    assert found.split() == "typedef int kt_b; typedef kt_b kt_c; typedef int kt_a;".split()


def test_module_is_written_from_the_real_header(tmp_path: Path):
    target, source = tmp_path / "_native.py", tmp_path / "stamp.c"
    cdef.main(NATIVE / "include" / "kt.h", target, source)
    namespace: dict[str, object] = {}
    exec(target.read_text(), namespace)
    assert namespace["ffi"].sizeof("enum kt_result") == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["_native.py", "stamp.c"]


def test_other_declarations_have_another_stamp():
    stamps = {
        cdef.stamp_of(cdef.declarations(text))
        for text in (HEADER, HEADER.replace("0x10u", "0x11u"))
    }
    assert len(stamps) == 2 and all(0 <= stamp < 1 << 31 for stamp in stamps)
    assert cdef.declarations(HEADER.replace("24", "25")) == cdef.declarations(HEADER)  # a comment


FOREIGN = {"": "no stamp", "int kt_api_stamp(void) { return 1; }": "another stamp"}


@pytest.mark.parametrize("code", FOREIGN, ids=FOREIGN.get)
def test_a_library_of_other_declarations_is_one_sentence(code: str, tmp_path: Path):
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("there is no C compiler")
    (tmp_path / "x.c").write_text(code)
    library = str(tmp_path / "libother.so")
    subprocess.run([compiler, "-shared", "-o", library, tmp_path / "x.c"], check=True)
    done = subprocess.run([sys.executable, "-m", "ktcli", "doctor"], env={**os.environ, "KT_LIBRARY": library},
                          capture_output=True, text=True)  # fmt: skip
    assert f"{library} was built from another version of kt" in done.stdout + done.stderr
    assert "pip install ." in done.stdout + done.stderr and "Traceback" not in done.stderr
