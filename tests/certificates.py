"""A certificate for a server of 127.0.0.1 that is its own authority, which nobody trusts unless told to."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from ktcli.certificates import VARIABLES


def made_certificate(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, ssl.SSLContext]:
    """The file with a certificate that no variable names, and the context of a server that has it; skips without
    openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes a certificate for this test, is not installed")
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    key, cert = folder / "key.pem", folder / "cert.pem"
    asked = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=x"
    # smg takes no certificate of an authority for that of a server.
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=CA:FALSE"]
    files = ["-keyout", str(key), "-out", str(cert)]
    subprocess.run(["openssl", *asked.split(), *names, *files], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return cert, context
