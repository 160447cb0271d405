"""Builds the libraries that torch for CUDA 13 is linked with: a runtime and a driver without a GPU, and others
that do nothing.

What each must define is read off torch's own libraries, so that none of NVIDIA's (3 GB) is needed but the
headers of its runtime.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
# Symbols without a version say by their names which library has them.
PREFIXES = {
    "nccl": "libnccl.so",
    "cusparseLt": "libcusparseLt.so",
    "cuFile": "libcufile.so",
    "curand": "libcurand.so",
    "cusolver": "libcusolver.so",
}
OURS = re.compile(r"libcu|libnccl|libnvrtc|libnvshmem")
KERNELS = re.compile(r"gemm|gemv|dot|Dot|trsm|getr|geqrf|gels")
COMPILE = ["gcc", "-O1", "-g", "-fPIC", "-w", "-pthread"]

HEAD = """#include <stddef.h>
#include <stdlib.h>
#include <string.h>
extern int fake_note_kernel(void *, const char *) __attribute__((weak));
#define API __attribute__((visibility("default")))
"""
# What must give something back; any other function returns 0, success.
BODIES = {
    "cublasCreate_v2": "(void **h) { *h = calloc(1, 64); return 0; }",
    "cublasSetStream_v2": "(void **h, void *s) { *h = s; return 0; }",
    "cublasGetStream_v2": "(void **h, void **s) { *s = *h; return 0; }",
    "cublasGetPointerMode_v2": "(void *h, int *v) { *v = 0; return 0; }",
    "cublasGetMathMode": "(void *h, int *v) { *v = 0; return 0; }",
    "cudnnGetVersion": "(void) { return 91900; }",
    "cublasLtCreate": "(void **h) { *h = calloc(1, 64); return 0; }",
    "cublasLtMatmulDescCreate": "(void **h) { *h = calloc(1, 512); return 0; }",
    "cublasLtMatrixLayoutCreate": "(void **h) { *h = calloc(1, 512); return 0; }",
    "cublasLtMatmulPreferenceCreate": "(void **h) { *h = calloc(1, 512); return 0; }",
    "cublasLtMatmulAlgoGetHeuristic": "(void *h, void *d, void *a, void *b, void *c, void *e, void *p, int asked, "
    "char *results, int *n) { memset(results, 0, 128); *n = 1; return 0; }",
    "cublasLtMatmul": "(void *h, void *d, void *al, void *A, void *a, void *B, void *b, void *be, void *C, void *c, "
    'void *D, void *dd, void *algo, void *w, size_t ws, void *s) { return fake_note_kernel(s, "cublasLtMatmul"); }',
}  # fmt: skip


def build(site: Path, out: Path) -> None:
    """Build all of them into `out`, for the torch and the headers that lie in `site`."""
    needed = needs(site / "torch" / "lib")
    include = [f"-I{site}/nvidia/cu13/include"]
    run(*COMPILE, *include, "-c", HERE / "fakecuda.c", "-o", out / "fakecuda.o")
    runtime = "libcudart.so.13"
    written = re.findall(r"^API [\w\s*]*?\b(\w+)\(", (HERE / "fakecuda.c").read_text(), re.M)
    rest = out / "rest.c"
    rest.write_text(HEAD + "".join(map(function, sorted(needed[runtime].names - set(written)))))
    link(out, runtime, needed.pop(runtime).version, rest, out / "fakecuda.o")
    # The driver's name, for those that ask for it: everything is in the other.
    empty = out / "empty.c"
    empty.write_text("")
    run(*COMPILE, "-shared", empty, "-Wl,-soname,libcuda.so.1", "-Wl,--no-as-needed", out / runtime,
        "-Wl,-rpath,$ORIGIN", "-o", out / "libcuda.so.1")  # fmt: skip
    for library, need in needed.items():
        if library != "libcuda.so.1":
            source = out / f"{library}.c"
            source.write_text(HEAD + "".join(map(function, sorted(need.names))))
            link(out, library, need.version, source)


@dataclass
class Needed:
    """What torch needs of one library: the names of its functions, and the name of their version."""

    names: set[str] = field(default_factory=set)
    version: str = ""


def needs(folder: Path) -> dict[str, Needed]:
    """What each library of NVIDIA's must define for those in a folder, by soname."""
    found: dict[str, Needed] = {}
    nameless = set()
    for path in folder.glob("*.so"):
        for library in re.findall(r"NEEDED.*\[(.*)\]", said("readelf", "-d", path)):
            if OURS.match(library):
                found.setdefault(library, Needed())
        of = {}
        for library, rest in re.findall(
            r"File: (\S+)((?:(?!File:).)*)", said("readelf", "-V", path), re.S
        ):
            of |= dict.fromkeys(re.findall(r"Name: (\S+)", rest), library)
        for line in said(
            "nm", "-D", "--undefined-only", "--with-symbol-versions", path
        ).splitlines():
            name, _, version = line.split()[-1].partition("@")
            if not version:
                nameless.add(name)
            elif OURS.match(of[version]):
                found[of[version]].names.add(name)
                found[of[version]].version = version
    for prefix, stem in PREFIXES.items():
        for library, needed in found.items():
            if library.startswith(stem):
                needed.names |= {name for name in nameless if name.startswith(prefix)}
    return found


def function(name: str) -> str:
    body = BODIES.get(name)
    if not body and name.startswith("cublas") and KERNELS.search(name):
        body = f'(void **h) {{ return fake_note_kernel(*h, "{name}"); }}'
    return f"API int {name}{body or '(void) { return 0; }'}\n"


def link(out: Path, library: str, version: str, *parts: Path) -> None:
    script = out / f"{library}.map"
    script.write_text(f"{version or library} {{ global: *; }};\n")
    run(*COMPILE, "-shared", *parts, f"-Wl,-soname,{library}", f"-Wl,--version-script={script}", "-ldl",
        *([] if (out / "fakecuda.o") in parts else [out / "libcudart.so.13"]), "-o", out / library)  # fmt: skip


def run(*command: object) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stderr}"


def said(*command: object) -> str:
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=True
    ).stdout
