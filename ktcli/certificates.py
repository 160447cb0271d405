"""Says which authorities sign the certificates of https servers: those of the system, unless a variable names others.

    SSL_CERT_FILE, else REQUESTS_CA_BUNDLE      a file of certificates in PEM, or a folder that c_rehash has indexed

Whatever asks a server uses them, and so does a router that kt starts.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from ktcli.errors import ServerFailed, UsageError

VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")


def authorities() -> Path:
    """Returns the file or folder with the certificates of the authorities that TLS connections trust: that of the
    environment variable SSL_CERT_FILE or REQUESTS_CA_BUNDLE, else the system's, else certifi's.

    Raises:
        UsageError: the variable names a file or folder without certificates.
    """
    if (named := _named()) is not None:
        return _checked(*named)
    system = ssl.get_default_verify_paths()
    if system.cafile is not None:
        return Path(system.cafile)
    if system.capath is not None and _indexed(found := Path(system.capath)):
        return found
    import certifi  # a system without any

    return Path(certifi.where())


def context() -> ssl.SSLContext:
    """Returns an SSL context that trusts the certificates of `authorities`. Raises: UsageError: see there."""
    found = str(authorities())
    folder = os.path.isdir(found)
    return ssl.create_default_context(
        cafile=None if folder else found, capath=found if folder else None
    )


def environment() -> dict[str, str]:
    """Returns {"SSL_CERT_FILE": path}, for a folder {"SSL_CERT_DIR": path}, with which a child process trusts the same
    certificate authorities; {} if no environment variable names any.
    """
    if (named := _named()) is None:
        return {}
    path = named[1].absolute()
    return {"SSL_CERT_DIR" if path.is_dir() else "SSL_CERT_FILE": str(path)}


def unverified(url: str, error: ssl.SSLCertVerificationError) -> ServerFailed:
    """Returns the error that says that the certificate of the server at `url` cannot be verified."""
    return ServerFailed(
        f"the certificate of {url} cannot be verified: {error.verify_message}",
        hint=f"{VARIABLES[0]} names a file with certificates of your own that you trust",
    )


def _named() -> tuple[str, Path] | None:
    """Returns the variable that counts, and the path in it; None: none is set."""
    said = ((name, os.environ.get(name, "").strip()) for name in VARIABLES)
    return next(((name, Path(text).expanduser()) for name, text in said if text), None)


def _checked(name: str, path: Path) -> Path:
    """Returns a file or folder that has certificates. Raises: UsageError: it has none."""
    try:
        if path.is_dir():
            if _indexed(path):
                return path
            why = "a folder without certificates that c_rehash has indexed"
        else:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
            return path
    except ssl.SSLError:
        why = "not a file of certificates"
    except OSError as error:
        why = f"not readable: {error.strerror}"
    raise UsageError(f"{name} is {str(path)[:300]!r}, which is {why}", hint=f"unset {name}")


def _indexed(folder: Path) -> bool:
    """Returns whether a folder has certificates under the names by which they are looked up."""
    return any(folder.glob("*.[0-9]"))
