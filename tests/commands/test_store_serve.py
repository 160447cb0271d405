"""`kt store serve`: what is refused before anything is started."""

from __future__ import annotations

import socket

import pytest
from ports import free_port

from ktcli.assembly.mooncake import StoreSettings, serve_store
from ktcli.errors import KtError, NotEnoughMemory, UsageError
from ktcli.main import main
from ktcli.store import engines
from ktcli.store.mooncake.address import MooncakeAddress

JOIN = ("--join", "mooncake://10.0.0.1:50051")
TOO_MUCH = 1 << 60


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--memory", "x"), "'x', which is not a size; it can be a size, such as 20G, 500M or 0; leave it out for"),
        (("--memory", "0"), "--memory 0 leaves the store no memory"),
        (("--host", ""), "listens on all interfaces"),
        (("--host", "0.0.0.0"), "listens on all interfaces"),
        (("--host", "a b"), "is not the address of a Mooncake master"),
        (("--join", "10.0.0.1"), "'10.0.0.1' is not the address of a Mooncake master"),
        ((*JOIN, "--host", "10.0.0.2"), "--host has no meaning with --join"),
        ((*JOIN, "--port", "50051"), "--port has no meaning with --join"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["store", "serve", *words]) == 2
    err = "; ".join(line.strip() for line in capsys.readouterr().err.splitlines())
    assert said in err and err.count("error: ") == 1


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "require", lambda name: None)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_free_address_may_be_used(host: str, installed: None) -> None:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, 0), family=family).close()
    except OSError:
        pytest.skip(f"this machine has no address {host}")
    settings = StoreSettings(MooncakeAddress(host, free_port()), TOO_MUCH)
    with pytest.raises(NotEnoughMemory):  # which is asked next
        serve_store(settings, lambda: None)


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("host", ["a..b", "a" * 64])
def test_a_name_that_cannot_be_one_is_one_sentence(host: str, joins: bool, installed: None) -> None:
    settings = StoreSettings(MooncakeAddress(host, free_port()), TOO_MUCH, joins, is_insecure=True)
    with pytest.raises(KtError, match=r"there is no such host$|not known$") as caught:
        serve_store(settings, lambda: None)
    assert isinstance(caught.value, UsageError) is not joins
