"""A server that never computed a prompt goes on with what another left in a Mooncake store, bit for bit; whatever the
store does, the answer is the one without it. The client is a fake."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from engine.test_shared_store import QUOTA, Heard
from engine.test_store_faults import CONTEXT, TEXT, Ids, answer
from engine.test_tier import leave
from hybrid import Made
from loading import load_engine
from ports import free_port
from store.fake_mooncake import FakeMooncake, fake_mooncake
from waits import patient

from ktcli.assembly import kvshared
from ktcli.assembly.kvpages import stored_pages
from ktcli.assembly.kvplaces import MooncakePlace
from ktcli.engine import CpuEngine
from ktcli.engine.restoring import ReadingWorth
from ktcli.store import engines
from ktcli.store.engines import InstalledEngine
from ktcli.store.mooncake import client

Patch = pytest.MonkeyPatch
MORE = ("gpt-oss", "deepseek-v3")
LONGER = np.concatenate([TEXT, np.arange(12, dtype=np.int32)])  # the next turn


@pytest.fixture(
    scope="module",
    params=["qwen3", "qwen3-next", *(pytest.param(n, marks=pytest.mark.thorough) for n in MORE)],
)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CpuEngine:
    made = Made.convert(request.param, tmp_path_factory.mktemp(request.param))
    return load_engine(made.path, context=CONTEXT, threads=1)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: Patch) -> Iterator[FakeMooncake]:
    """A store whose client is installed, as far as kt knows."""
    installed = InstalledEngine("mooncake", "0", tmp_path)
    (tmp_path / engines.MANIFEST).write_text("{}")
    monkeypatch.setattr(kvshared.engines, "require", lambda name: installed)
    monkeypatch.setattr(ReadingWorth, "pays", lambda *_: True)
    patient(monkeypatch, client)
    with fake_mooncake(tmp_path) as made:
        monkeypatch.setattr(kvshared, "command_of", lambda engine: made.connection.command)
        yield made


class Server:
    """A library with an engine, one after the other of several that see a store."""

    def __init__(self, engine: CpuEngine, folder: Path, address: str, patch: Patch) -> None:
        self._engine, self._folder, self._address, self._patch = engine, folder, address, patch
        self.listener = Heard()

    def answer(self, ids: Ids = LONGER, quota: int = QUOTA) -> tuple[dict[str, int], list[bytes]]:
        """Answers with a memory that holds nothing; returns the positions that came from each store, and the logits."""
        self._patch.setenv("KT_HOME", str(self._folder))
        leave(self._engine)
        place = MooncakePlace(self._address)
        with stored_pages(self._engine, self._folder / "m", quota, self.listener, place):
            _, rows = answer(self._engine, ids)
            tier = self._engine.pools.tier
            return ({} if tier is None else tier.restored), rows


def server(engine: CpuEngine, fake: FakeMooncake, name: Path, patch: Patch) -> Server:
    return Server(engine, name, str(fake.connection.address), patch)


@pytest.fixture
def wanted(engine: CpuEngine) -> list[bytes]:
    """The logits of an answer without a store."""
    leave(engine)
    return answer(engine, LONGER)[1]


def test_another_server_goes_on_from_the_store_and_keeps_what_it_read(
    engine: CpuEngine, fake: FakeMooncake, wanted: list[bytes], tmp_path: Path, monkeypatch: Patch
) -> None:
    one, two = (server(engine, fake, tmp_path / name, monkeypatch) for name in ("one", "two"))
    assert one.answer(TEXT)[0] == {"disk": 0, "store": 0} and fake.count
    came, rows = two.answer()
    assert rows == wanted and came["disk"] == 0 and came["store"] >= 256
    came, rows = two.answer()
    assert rows == wanted and came["disk"] >= 256 and came["store"] == 0
    three = server(engine, fake, tmp_path / "three", monkeypatch)
    came, rows = three.answer(quota=0)
    assert rows == wanted and came["store"] >= 256
    assert not any(each.listener.said for each in (one, two, three))
    assert "listen on all interfaces" in three.listener.noted[0]


@pytest.mark.parametrize("call", ["setup", "exist", "get", "put"])
def test_a_store_that_fails_costs_time_and_nothing_else(
    engine: CpuEngine,
    fake: FakeMooncake,
    wanted: list[bytes],
    tmp_path: Path,
    monkeypatch: Patch,
    call: str,
) -> None:
    one, two = (server(engine, fake, tmp_path / name, monkeypatch) for name in ("one", "two"))
    one.answer(TEXT)
    fake.fails(call)
    for name in ("LOOK_S", "READ_S", "STALL_S", "CLOSE_S"):
        monkeypatch.setattr(client, name, 0.1)
    monkeypatch.setattr(client, "OPEN_S", 0.5 if call == "setup" else 30.0)
    came, rows = two.answer()
    assert rows == wanted
    assert came["store"] == 0 or call == "put"
    assert len(two.listener.said) <= 1


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("mooncake://10.0.0.1", "is not the address of a Mooncake master"),
        ("mooncake://10.0.0.1:0", "is not the address of a Mooncake master"),
        ("mooncake://a b:1", "is not the address of a Mooncake master"),
        (
            "mooncake://8.8.8.8:50051",
            "is not an address of a private network: Mooncake has no auth",
        ),
        ("mooncake://[2001:4860::1]:50051", "is not an address of a private network"),
        ("mooncake://[::ffff:8.8.8.8]:50051", "is not an address of a private network"),
        ("mooncake://0:50051", "0.0.0.0 (0) is not an address of a private network"),
        ("mooncake://[::0]:50051", ":: (::0) is not an address of a private network"),
        ("mooncake://[::ffff:0.0.0.0]:50051", "is not an address of a private network"),
        ("mooncake://127.0.0.1:{free}", "cannot be reached: Connection refused"),
    ],
)
def test_an_address_that_is_none_is_one_sentence(
    engine: CpuEngine,
    fake: FakeMooncake,
    tmp_path: Path,
    monkeypatch: Patch,
    address: str,
    words: str,
) -> None:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "one"))
    place = MooncakePlace(address.format(free=free_port()))
    heard = Heard()
    with stored_pages(engine, tmp_path / "m", QUOTA, heard, place) as store:
        assert store is not None
    assert len(heard.said) == 1 and words in heard.said[0] and "goes on without" in heard.said[0]
    assert "\n" not in heard.said[0]


def test_what_is_not_installed_is_one_sentence(
    engine: CpuEngine, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("KT_HOME", str(tmp_path))
    heard = Heard()
    with stored_pages(
        engine, tmp_path / "m", 0, heard, MooncakePlace("mooncake://10.0.0.1:1")
    ) as store:
        assert store is None
    said = "mooncake is not installed (install it with: kt engine install mooncake)"
    assert heard.said == [f"{said}; kt goes on without it"]
