"""The engines kt is compared with: packages, how each is built, which worker drives it."""

from __future__ import annotations

from dataclasses import dataclass

# Only the library: no tools, server, tests.
_LIBRARY = (
    "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"
    " -DLLAMA_BUILD_SERVER=OFF -DLLAVA_BUILD=OFF"
)
_AVX2 = (
    "-DGGML_NATIVE=OFF -DGGML_SSE42=ON -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_BMI2=ON"
    " -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_AVX512=OFF"
)


@dataclass(frozen=True, slots=True)
class Engine:
    """One peer.

    Attributes:
        package: its name in the package index; its version stands in constraints.txt.
        worker: module in `workers` that loads and runs it.
        cmake_args: built from source with these; None: the wheel as it is.
        apart: lies in a folder of its own, because two builds of a package cannot share one.
        needs: packages of the private environment beside gguf and matplotlib.
        gguf: reads model files; others build their models from the config.
        lacks: (path in the source package, file beside this one): what the package forgot to ship.
    """

    package: str
    worker: str
    cmake_args: str | None = None
    apart: bool = True
    needs: tuple[str, ...] = ()
    gguf: bool = True
    lacks: tuple[str, str] | None = None


_LLAMA_NEEDS = ("diskcache", "jinja2", "typing-extensions")

ENGINES = {
    "llama.cpp": Engine(
        "llama-cpp-python", "llama", f"-DGGML_NATIVE=ON {_LIBRARY}", needs=_LLAMA_NEEDS
    ),
    "llama.cpp-avx2": Engine(
        "llama-cpp-python", "llama", f"{_AVX2} {_LIBRARY}", needs=_LLAMA_NEEDS
    ),
    # Flash attention only for the cache's own type: all combinations take an hour to compile.
    "ik_llama": Engine(
        "ik-llama-cpp-python",
        "ik_llama",
        "-DGGML_NATIVE=ON -DGGML_IQK_FLASH_ATTENTION=ON -DGGML_IQK_FA_ALL_QUANTS=OFF",
        lacks=("vendor/ik_llama.cpp/common/cmake/build-info-gen-cpp.cmake", "build_info.cmake"),
    ),
    "transformers": Engine(
        "transformers", "transformers", apart=False, needs=("torch",), gguf=False
    ),
    # Made for another torch; what is called works with this one. Its other needs are for GPUs.
    "kt-kernel": Engine(
        "kt-kernel", "kt_kernel", needs=("torch", "safetensors", "psutil"), gguf=False
    ),
}
