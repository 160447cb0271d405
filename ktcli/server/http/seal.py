"""Seals texts that a client stores for the server: others can neither read nor change them.

The key is random and lives as long as the process, so what another server sealed, or this one before it was started
again, is unknown. A text is hidden by the stream that SHAKE-256 makes of a key and a nonce, and an HMAC-SHA256 of
nonce, owner and hidden text says that it is whole (encrypt, then authenticate).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets

import numpy as np

CHARS_MOST = 8 << 20  # of a sealed text
_PREFIX = "kt1."
_KEY_BYTES, _NONCE_BYTES, _TAG_BYTES = 32, 16, 32


class ThoughtSeal:
    """Encrypts and decrypts texts with a key of its own."""

    def __init__(self) -> None:
        self._hiding, self._signing = (secrets.token_bytes(_KEY_BYTES) for _ in range(2))

    def seal(self, text: str, owner: str) -> str:
        """Returns a text in an encrypted form that only `open` reads, for the same owner; empty: it would be longer
        than 8 MiB."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        hidden = self._hidden(text.encode("utf-8", "surrogatepass"), nonce)
        made = nonce + hidden + self._tag(nonce, hidden, owner)
        sealed = _PREFIX + base64.urlsafe_b64encode(made).decode()
        return sealed if len(sealed) <= CHARS_MOST else ""

    def open(self, sealed: str, owner: str) -> str | None:
        """Returns the decrypted text; None: it was not encrypted by this server for this owner, or was changed."""
        if not sealed.startswith(_PREFIX) or len(sealed) > CHARS_MOST or not sealed.isascii():
            return None
        try:
            made = base64.b64decode(sealed[len(_PREFIX) :], b"-_", validate=True)
        except binascii.Error:
            return None
        end = len(made) - _TAG_BYTES
        nonce, hidden, tag = made[:_NONCE_BYTES], made[_NONCE_BYTES:end], made[end:]
        if end < _NONCE_BYTES or not hmac.compare_digest(tag, self._tag(nonce, hidden, owner)):
            return None
        return self._hidden(hidden, nonce).decode("utf-8", "surrogatepass")

    def _hidden(self, data: bytes, nonce: bytes) -> bytes:
        """Returns bytes with the stream of a nonce over them, which hides or shows them."""
        stream = hashlib.shake_256(self._hiding + nonce).digest(len(data))
        return (np.frombuffer(data, np.uint8) ^ np.frombuffer(stream, np.uint8)).tobytes()

    def _tag(self, nonce: bytes, hidden: bytes, owner: str) -> bytes:
        whose = hashlib.sha256(owner.encode()).digest()
        return hmac.digest(self._signing, nonce + whose + hidden, "sha256")
