"""Servers with certificates of an authority of one's own: the same for every command that asks a server."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from certificates import made_certificate
from client.openai_server import ScriptedOpenAI, openai_server
from server.routed import install_fake

from ktcli import certificates
from ktcli.main import main

ASKING = {
    "chat": ["chat", "--server", "{url}", "hi there"],
    "route": ["route", "{url}", "--dry-run"],
    "bench": "bench serve --url {url} --num-prompts 1 --input-len 1 --output-len 2".split(),
}


def asked(command: str, server: ScriptedOpenAI) -> int:
    return main([word.format(url=server.url) for word in ASKING[command]])


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    install_fake()


def test_the_variable_that_people_use_works_for_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cert, context = made_certificate(tmp_path, monkeypatch)
    with openai_server(context) as server:
        for command in ASKING:
            assert asked(command, server) == 6
            said = capsys.readouterr().err
            assert f"the certificate of {server.url} cannot be verified" in said
            assert "SSL_CERT_FILE names a file" in said and "Traceback" not in said
            assert not server.requests
            for name in certificates.VARIABLES:
                with monkeypatch.context() as patch:
                    patch.setenv(name, str(cert))
                    assert asked(command, server) == 0, capsys.readouterr().err
            server.requests.clear()


@pytest.mark.parametrize("command", ASKING)
@pytest.mark.parametrize("what", ["missing", "text", "folder"])
def test_a_variable_that_names_no_certificates_is_said(
    what: str,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "text").write_text("not a certificate")
    (tmp_path / "folder").mkdir()
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / what))
    with openai_server() as server:
        server.url = server.url.replace("http:", "https:")
        assert asked(command, server) == 2
    said = capsys.readouterr().err
    assert f"REQUESTS_CA_BUNDLE is '{tmp_path / what}', which is not" in said or what == "folder"
    assert len(said.splitlines()) == 2 and "unset REQUESTS_CA_BUNDLE" in said


def test_a_program_of_others_is_told_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, _ = made_certificate(tmp_path, monkeypatch)
    assert certificates.environment() == {}
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(cert))
    assert certificates.environment() == {"SSL_CERT_FILE": str(cert)}
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "0a1b2c3d.0").symlink_to(cert)
    monkeypatch.setenv("SSL_CERT_FILE", str(folder))
    assert certificates.environment() == {"SSL_CERT_DIR": str(folder)}
    assert certificates.context().verify_mode.name == "CERT_REQUIRED"
