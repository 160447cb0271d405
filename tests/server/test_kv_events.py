"""Laws of the events of KV pages: who applies them in order knows what can be found, and nobody else's pages."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from store.page_labels import opened, put

from ktcli.commands.serve.lines import event_lines
from ktcli.commands.serve.options import asked_events
from ktcli.engine.forms import ABSORBED
from ktcli.engine.prefix import chain, salted
from ktcli.errors import UsageError
from ktcli.main import main
from ktcli.pagelabel import PageKind, PageLabel
from ktcli.server.kvevents.address import EventsAddress
from ktcli.server.kvevents.blocks import BlockBook, block_hash, root_hash
from ktcli.server.kvevents.changes import DISK, PageChanges
from ktcli.server.kvevents.publisher import publishing
from ktcli.server.kvevents.wire import AllBlocksCleared, BlockRemoved, BlockStored, Event
from ktcli.store.pagefolder import PageFolder
from ktcli.store.pages import PageStore

ROOT = sha256(b"seed").digest()
SALTED = salted(ROOT, "somebody's")
SEED = "0"


def line(ids: Iterable[int], n: int, root: bytes = ROOT, how: int = 0) -> list[PageLabel]:
    """The full pages of a sequence that says the same ids in each."""
    made, previous = list[PageLabel](), root
    for end in range(64, 64 * n + 1, 64):
        page = np.resize(np.fromiter(ids, np.int32), 64).astype(np.int32)
        depths = np.full(64, how, np.uint8)
        key = chain(previous, page, depths)
        made.append(PageLabel(PageKind.PAGE, key, previous, end, page, depths))
        previous = key
    return made


def hashes(labels: Iterable[PageLabel]) -> list[bytes]:
    """What routers call the pages of one sequence."""
    made, before = list[bytes](), root_hash(SEED)
    for label in labels:
        before = block_hash(before, label.ids.tolist())
        made.append(before)
    return made


class Router:
    """What somebody knows who hears all events."""

    def __init__(self) -> None:
        self.there: set[tuple[bytes, str]] = set()
        self.known: set[bytes | None] = {None}

    def hear(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case BlockStored([made], parent, ids, medium):
                    assert parent in self.known, "a block came before the one before it"
                    assert made == block_hash(parent or root_hash(SEED), ids)
                    assert (made, medium) not in self.there
                    self.known.add(made)
                    self.there.add((made, medium))
                case BlockRemoved([made], medium):
                    self.there.remove((made, medium))
                case AllBlocksCleared():
                    self.there.clear()
                case other:
                    pytest.fail(f"{other}")


@pytest.fixture
def changes() -> PageChanges:
    made = PageChanges(lambda: None)
    made.begins(ROOT, "CPU")
    return made


def test_hashes_are_those_of_vllm() -> None:
    """Made by cbor2 6.3.0 and hashlib."""
    root = root_hash("0")
    assert root.hex() == "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e"
    first = block_hash(root, range(64))
    assert first.hex() == "ddfc07d6c65195c803c8619358c7b0ae3aabee104d3bc6e59787c2001f45d77a"
    edges = [23, 24, 255, 256, 65535, 65536, 2**31 - 1]
    assert (
        block_hash(first, edges).hex()
        == "edb7f448c652ababe26c9da054171971de47981453f0989e34c485316b29a803"
    )
    assert (
        root_hash("Größe" * 30).hex()
        == "fe307de47b2716fc4db361277283b25cccb7babb29645e56afafdb8f99601b6a"
    )


def test_hashes_of_a_thousand_prompts_equal_those_of_cbor2() -> None:
    cbor2 = pytest.importorskip("cbor2")

    def reference(value: object) -> bytes:
        return sha256(cbor2.dumps(value, canonical=True)).digest()

    draw = random.Random(7)
    for _ in range(1000):
        seed = draw.choice(["0", "", "random", "ß" * draw.randrange(300)])
        mine, right = root_hash(seed), reference(seed)
        for _ in range(draw.randint(1, 3)):
            ids = [draw.randrange(1 << draw.randint(1, 31)) for _ in range(64)]
            mine, right = block_hash(mine, ids), reference((right, tuple(ids), None))
            assert mine == right


@pytest.mark.parametrize("seed", range(4))
def test_who_hears_everything_knows_what_is_there(changes: PageChanges, seed: int) -> None:
    draw, book = random.Random(seed), BlockBook(SEED)
    lines = [line((n,), 5, how=how) for n in range(3) for how in (0, ABSORBED)]
    lines += [line((n,), 5, SALTED) for n in range(3)]
    wanted = [list(zip(some, hashes(some), strict=True)) for some in lines[:6]]
    early, there = Router(), set[bytes]()  # the keys of pages in memory
    for _ in range(200):
        for _ in range(draw.choice((1, 1, 5, 40))):
            some = draw.choice(lines)
            n = sum(label.key in there for label in some)
            if n < len(some) and draw.random() < 0.6:
                changes.came(some[n])
                there.add(some[n].key)
            elif n:
                changes.went(some[n - 1].key)
                there.remove(some[n - 1].key)
        early.hear(book.apply(changes.take()))
        right = {(made, "CPU") for some in wanted for label, made in some if label.key in there}
        assert early.there == right
    late = Router()
    late.hear(book.all())
    assert late.there == early.there
    changes.ends()
    early.hear(book.apply(changes.take()))
    assert not early.there and not len(book)


def test_a_page_that_came_and_went_is_not_told(changes: PageChanges) -> None:
    book = BlockBook(SEED)
    (page,) = line((1,), 1)
    changes.came(page)
    changes.went(page.key)
    assert list(book.apply(changes.take())) == [AllBlocksCleared()]
    changes.came(page)
    assert len(list(book.apply(changes.take()))) == 1
    changes.went(page.key)
    changes.came(page)
    assert list(book.apply(changes.take())) == []


def test_only_whole_pages_of_those_without_a_salt_are_told(changes: PageChanges) -> None:
    book = BlockBook(SEED)
    (page,) = line((1,), 1)
    begun = PageLabel(PageKind.PAGE, b"k" * 32, page.key, 74, page.ids[:10], page.depths[:10])
    for label in (page, begun, *line((2,), 3, SALTED)):
        changes.came(label)
    cleared, told = book.apply(changes.take())
    assert cleared == AllBlocksCleared()
    assert told == BlockStored(hashes([page]), None, page.ids.tolist(), "CPU")
    assert told.block_size == 64 and told.lora_id is None and told.lora_name is None


def test_a_chain_that_is_broken_is_told_up_to_there(changes: PageChanges) -> None:
    book = BlockBook(SEED)
    pages = line((1,), 4)
    for page in (pages[0], pages[2], pages[3]):
        changes.came(page)
    router = Router()
    router.hear(book.apply(changes.take()))
    assert router.there == {(hashes(pages)[0], "CPU")}
    changes.went(pages[0].key)
    router.hear(book.apply(changes.take()))
    assert not router.there and not len(book)


def test_what_is_lost_is_told_as_a_new_beginning() -> None:
    changes, book = PageChanges(lambda: None, most=8), BlockBook(SEED)
    changes.begins(ROOT, "GPU")
    router = Router()
    pages = line((1,), 12)
    for page in pages[:4]:
        changes.came(page)
    router.hear(book.apply(changes.take()))
    assert len(router.there) == 4
    for page in pages[4:]:
        changes.came(page)
    changes.went(pages[0].key)  # one more than there is room for
    router.hear(book.apply(changes.take()))
    assert not router.there
    changes.came(pages[0])
    router.hear(book.apply(changes.take()))
    assert router.there == {(hashes(pages)[0], "GPU")}


def test_somebody_is_woken_once_until_changes_are_taken() -> None:
    woken = list[int]()
    changes = PageChanges(lambda: woken.append(1))
    changes.came(line((1,), 1)[0])  # no model is open
    assert not woken
    changes.begins(ROOT, "CPU")
    before = len(woken)
    for page in line((1,), 3):
        changes.came(page)
    assert len(woken) == before + 1
    assert len(changes.take().pages) == 3 and not changes.take().pages


# --- on disk ----------------------------------------------------------------------------------------


def store_at(path: Path) -> PageStore:
    return opened(PageFolder(path / "kv"))


def test_what_is_on_disk_is_told_with_the_ids_of_its_file(
    tmp_path: Path, changes: PageChanges
) -> None:
    pages = line((1, 2, 3), 4)
    store = store_at(tmp_path)
    put(store, [*pages, *line((4,), 2, SALTED)])
    store.close()
    again, book, router = store_at(tmp_path), BlockBook(SEED), Router()
    again.observe(changes)
    router.hear(book.apply(changes.take()))
    wanted = hashes(pages)
    assert router.there == {(made, DISK) for made in wanted}
    # It comes to memory, and goes from there: it is on disk all the time.
    for page in pages:
        changes.came(page)
    router.hear(book.apply(changes.take()))
    assert router.there == {(made, medium) for made in wanted for medium in (DISK, "CPU")}
    for page in reversed(pages):
        changes.went(page.key)
    router.hear(book.apply(changes.take()))
    assert router.there == {(made, DISK) for made in wanted}
    # The file is evicted.
    for path in tmp_path.glob("kv/*/*.pages"):
        path.unlink()
    again.refresh()
    router.hear(book.apply(changes.take()))
    assert not router.there
    again.close()


def test_what_is_in_two_files_goes_with_the_second(tmp_path: Path, changes: PageChanges) -> None:
    pages = line((1,), 3)
    store, book, router = store_at(tmp_path), BlockBook(SEED), Router()
    store.observe(changes)
    put(store, pages[:2])
    store.flush()
    put(store, pages[2:])
    store.flush()
    first, second = sorted(tmp_path.glob("kv/*/*.pages"), key=lambda path: -path.stat().st_size)
    twin = first.with_name("twin.pages")
    twin.write_bytes(first.read_bytes())
    store.refresh()
    router.hear(book.apply(changes.take()))
    assert len(router.there) == 3
    first.unlink()
    store.refresh()
    router.hear(book.apply(changes.take()))
    assert len(router.there) == 3
    twin.unlink()
    second.unlink()
    store.refresh()
    router.hear(book.apply(changes.take()))
    assert not router.there
    store.close()


def test_a_file_whose_ids_are_not_those_of_its_keys_tells_nothing(
    tmp_path: Path, changes: PageChanges
) -> None:
    pages = line((1,), 2)
    store = store_at(tmp_path)
    put(store, pages)
    store.close()
    (path,) = tmp_path.glob("kv/*/*.pages")
    image = bytearray(path.read_bytes())
    at = image.index(pages[0].ids.astype("<i4").tobytes())
    image[at] ^= 2
    path.write_bytes(image)
    again, book = store_at(tmp_path), BlockBook(SEED)
    again.observe(changes)
    assert list(book.apply(changes.take())) == [AllBlocksCleared()]
    again.close()


# --- what a person says -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    "5557 tcp://127.0.0.1 tcp://127.0.0.1:0 tcp://127.0.0.1:65535 ipc://x tcp://:5557 tcp://1:2:3".split(),
)
def test_what_is_not_an_address_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "kt-mini", "--kv-events", text]) == 2
    first, hint = capsys.readouterr().err.splitlines()
    assert first.startswith(f"error: --kv-events is {text!r}, which is not an address") and hint


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
def test_a_name_that_cannot_be_one_is_refused(host: str) -> None:
    with pytest.raises(UsageError, match="--kv-events: cannot resolve"):
        EventsAddress(host, 5557).resolved()


def test_a_setting_names_the_address_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked_events(None) is None and asked_events("off") is None
    monkeypatch.setenv("KT_KV_EVENTS", "tcp://127.0.0.1:5557")
    found = asked_events(None)
    assert found == EventsAddress("127.0.0.1", 5557, "KT_KV_EVENTS")
    assert asked_events("off") is None and asked_events("tcp://[::1]:80") == EventsAddress(
        "::1", 80
    )
    assert found is not None and event_lines("m", "http://127.0.0.1:11435", found) == [
        "  events   tcp://127.0.0.1:5557; vllm-router --policy kv_aware --kv-event-model m"
        " --kv-event-block-size 64 --kv-penalty-host 1"
        " --kv-event-source http://127.0.0.1:11435=tcp://127.0.0.1:5557"
        " --kv-event-replay-source http://127.0.0.1:11435=tcp://127.0.0.1:5558"
    ]


def test_without_pyzmq_the_command_that_installs_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    address = EventsAddress("127.0.0.1", 5557)
    with pytest.raises(UsageError) as refused, publishing(address, print):
        pass
    assert str(refused.value) == "--kv-events needs pyzmq, which is not installed"
    assert refused.value.hint == "install it with: pip install 'ktcli[events]'"
