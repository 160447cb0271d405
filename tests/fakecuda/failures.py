"""Calls of CUDA that fail, each at any of its times, while a model is loaded, reads a prompt and answers.

What is to come of it is an error of kt's, known as the device's, or nothing at all where there is another way; a
conversation stands where it stood, and goes on where the device still works. Run by test_fakecuda.py, under the plugin
no_numbers.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from hybrid import IDS, Made
from triton.runtime import JITFunction

from ktcli.engine.device.engine import DeviceEngine
from ktcli.engine.device.handoff import Handoff
from ktcli.engine.device.passes import LongPrompts
from ktcli.engine.session import Session
from ktcli.errors import DeviceError, OutOfDeviceMemory

GPU = torch.device("cuda")
OUT_OF_MEMORY, ILLEGAL_ADDRESS, UNAVAILABLE = 2, 700, 46
CALLS = {
    "cudaMalloc": OUT_OF_MEMORY,
    "cudaHostRegister": OUT_OF_MEMORY,
    "cudaMemcpyAsync": ILLEGAL_ADDRESS,
    "cudaLaunchKernel": ILLEGAL_ADDRESS,
    "cuLaunchKernelEx": ILLEGAL_ADDRESS,
    "cuModuleLoadData": OUT_OF_MEMORY,
    "cudaLaunchHostFunc": ILLEGAL_ADDRESS,
    "cuStreamBatchMemOp": ILLEGAL_ADDRESS,
    "cudaStreamSynchronize": ILLEGAL_ADDRESS,
    "cudaEventRecordWithFlags": ILLEGAL_ADDRESS,
    "cudaHostGetDevicePointer": ILLEGAL_ADDRESS,
    "cudaStreamWaitEvent": ILLEGAL_ADDRESS,
    "cudaEventSynchronize": ILLEGAL_ADDRESS,
    "cudaStreamBeginCapture": ILLEGAL_ADDRESS,
    "cudaStreamEndCapture": ILLEGAL_ADDRESS,
    "cudaGraphInstantiateWithFlags": OUT_OF_MEMORY,
    "cudaGraphLaunch": ILLEGAL_ADDRESS,
    "cublas": 13,
}
BY_FLAGS = "cuStreamBatchMemOp", "cudaHostGetDevicePointer"  # what only that hand-off calls
MOST = 3  # times of a call that are tried, spread over all, and the last
MADE: set[str] = set()  # calls that were made, so that they could fail
CHUNK = 40
fake = ctypes.CDLL("libcudart.so.13")
fake.fake_calls.restype = ctypes.c_long
fake.fake_fail.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int]


def fail(call: str, after: int = 0, *, forever: bool = False) -> None:
    fake.fake_fail(call.encode(), after, CALLS.get(call, UNAVAILABLE), forever)


@pytest.fixture(autouse=True)
def all_is_well_again() -> Iterator[None]:
    yield
    fail("")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made.convert("qwen3", tmp_path_factory.mktemp("made"), GPU)


def loaded(made: Made, handoff: Handoff, *, streamed: bool = False) -> DeviceEngine:
    long = LongPrompts(0 if streamed else None, CHUNK)
    placed = made.placed(handoff=handoff, long_prompts=long, slab_bytes=1 << 14)
    return made.engine(placed, exact=False)


def times(call: str, work: Callable[[], object]) -> list[int]:
    """After how many calls one is to fail, so that each stage of the work sees a failure."""
    fake.fake_calls(call.encode())
    work()
    made = fake.fake_calls(call.encode())
    if made:
        MADE.add(call)
    step = 1 if call == "cudaMalloc" else max(1, made // MOST)  # memory may run out at each stage
    return sorted({*range(0, made, step), made - 1} - {-1})


def read(session: Session) -> None:
    session.feed(IDS[: 2 * session.length + 30])


def decoded(session: Session) -> None:
    session.feed([3], defer=1)


@pytest.mark.parametrize(
    ("call", "handoff"),
    [(call, Handoff.FLAGS if call in BY_FLAGS else Handoff.CALLS) for call in CALLS],
)
def test_a_failure_at_load_is_known_or_passed_over(made: Made, call: str, handoff: Handoff) -> None:
    def work() -> None:
        for kernel in kernels if call == "cuModuleLoadData" else ():
            kernel.device_caches.clear()  # else they are loaded already
        gc.collect()
        torch.cuda.empty_cache()
        loaded(made, handoff)

    gc.unfreeze()  # what was imported before (tests/conftest.py)
    kernels = [each for each in gc.get_objects() if type(each) is JITFunction]

    work()
    for after in times(call, work):
        fail(call, after)
        try:
            work()
        except DeviceError as error:
            assert "\n" not in str(error) and len(str(error)) < 400, error
            assert call != "cudaMalloc" or isinstance(error, OutOfDeviceMemory)
        fail("")
    loaded(made, handoff).session().feed([1])


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("step", "streamed", "handoff"),
    [(read, False, Handoff.FLAGS), (read, True, Handoff.CALLS)]
    + [(decoded, False, handoff) for handoff in Handoff],
)
def test_a_failure_in_a_step_leaves_the_conversation(
    made: Made, call: str, step: Callable[[Session], None], streamed: bool, handoff: Handoff
) -> None:
    engine = loaded(made, handoff, streamed=streamed)
    session = engine.session()
    session.feed(IDS[:20])

    def begin() -> None:
        session.truncate(20)
        torch.cuda.empty_cache()  # what a step takes is asked for anew

    def again() -> None:
        begin()
        step(session)

    again()
    for after in times(call, again):
        begin()
        fail(call, after)
        try:
            step(session)
        except DeviceError as error:
            assert "\n" not in str(error)
            assert call != "cudaMalloc" or isinstance(error, OutOfDeviceMemory)
            assert session.length in (20, 20 + CHUNK)  # whole chunks of a prompt stay
        fail("")
        again()


def test_a_full_memory_is_known_for_it(made: Made) -> None:
    fail("cudaMalloc", forever=True)
    gc.collect()
    torch.cuda.empty_cache()
    with pytest.raises(OutOfDeviceMemory):
        loaded(made, Handoff.CALLS)


@pytest.mark.parametrize("handoff", Handoff)
@pytest.mark.parametrize("step", [read, decoded])
def test_a_device_that_vanishes_ends_each_step(
    made: Made, handoff: Handoff, step: Callable[[Session], None]
) -> None:
    """And what an engine held comes back without ending the process."""
    engine = loaded(made, handoff, streamed=step is read)
    session = engine.session()
    session.feed(IDS[:20])
    fail("*", forever=True)
    for _ in range(2):
        with pytest.raises(DeviceError):
            step(session)
        assert session.length == 20
    del engine, session
    gc.collect()


def test_each_call_was_made() -> None:
    """Else its failures above say nothing."""
    assert set(CALLS) == MADE
