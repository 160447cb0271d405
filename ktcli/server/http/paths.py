"""Finds the path that a request means: clients leave out `/v1`, add a slash, or send a full URL as to a proxy."""

from __future__ import annotations

import re

_ADDRESS = re.compile(r"https?://[^/?#]*", re.IGNORECASE)
# The paths of OpenAI's and Anthropic's APIs, behind the `/v1` that belongs to the address.
_UNVERSIONED = re.compile(
    r"/(?:chat/completions(?:/render|/input_tokens)?|completions|embeddings|models(?:/.+)?|messages(?:/count_tokens)?"
    r"|responses(?:/.+)?)"
)
# Paths of this server that clients ask for behind an address that ends in `/v1`.
_OWN = re.compile(r"/v1/(?:tokenize|detokenize|apply-template|props|version|health|metrics)")


def meant_path(path: str, root: str = "") -> str:
    """Returns the path of the server that a request means.

    Args:
        path: the target of the request, decoded, without its query.
        root: the path below which a proxy publishes the server; it may have taken it off.
    """
    found = _ADDRESS.sub("", path, count=1) if _ADDRESS.match(path) else path
    if root and (found == root or found.startswith(f"{root}/")):
        found = found.removeprefix(root)
    found = found.rstrip("/") or "/"
    if _OWN.fullmatch(found):
        return found.removeprefix("/v1")
    return f"/v1{found}" if _UNVERSIONED.fullmatch(found) else found
