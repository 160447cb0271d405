"""The libraries that the page uses: versions, files and hashes. `make page` fetches them, and tests compare the hashes.

Files of a library have its version in their names, so browsers may keep them for good.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath

from ktcli.records import dataclass


@dataclass(frozen=True, slots=True)
class Library:
    """A package of the npm registry, of which some files are in `vendor/`.

    Attributes:
        tarball_sha256: of the package's archive.
        sources: the SHA-256 of each file, by its path in the package.
        stem: what the names in `vendor/` begin with; empty: the package's name.
    """

    package: str
    version: str
    license: str
    tarball_sha256: str
    sources: Mapping[str, str]
    stem: str = ""

    @property
    def files(self) -> list[tuple[str, str, str]]:
        """The files of the library as (path in the npm package, name in `vendor/`, SHA-256 in hexadecimal)."""
        return [(path, self._name_of(path), sha256) for path, sha256 in self.sources.items()]

    def _name_of(self, path: str) -> str:
        kind = "LICENSE" if path.startswith("LICENSE") else f"min{PurePath(path).suffix}"
        return f"{self.stem or self.package}-{self.version}.{kind}"


LIBRARIES = (
    Library(
        "markdown-it",
        "15.0.3",
        "MIT",
        "98a7453983ab0e268c17dbd5260bf7190ba46b4cca912327fc1c1a2578e4b56d",
        {
            "dist/browser/markdown-it.esm.min.mjs": "d5432491790141da046b1197353705db03264f40b5727f3b4b591f5aba193e30",
            "LICENSE": "792c48c5a849a15fdf9e37e8bcf9e6d1dd13b32b46c642a748a0a46a9919d473",
        },
    ),
    Library(
        "dompurify",
        "3.5.0",
        "MPL-2.0 OR Apache-2.0",
        "faa5f2bfe2814384b83d6edb4ed66812fbfdb2a654b4d59edd4b12304058ec20",
        {
            "dist/purify.min.js": "f69a46022ab1f53e969c8ebbca98172c8995785a9b3be72ea4a12d25b1a1bf67",
            "LICENSE": "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30",
        },
    ),
    Library(
        "katex",
        "0.19.1",
        "MIT",
        "24da5a599eb2fcede2e270b99a6ff48bca816beecc95feeb84e8cccbd1bb34fd",
        {
            "dist/katex.min.js": "fa140498b8cfc8302cbe5e7cb1bdbc1f952bc38b3fa258ede09e73edbf9a74bc",
            "LICENSE": "766ccc1f306c885aa45542a9846bbd0a505b27a0374f146778171c2254ce18e3",
        },
    ),
    Library(
        "@highlightjs/cdn-assets",
        "11.12.0",
        "BSD-3-Clause",
        "b8a006d30f45afe783072569f3d69c5b60c0e7b9ca28cd474e12f2584e2a3bd9",
        {
            "es/highlight.min.js": "1ed8fc5256b738b8875b74e4d3f0754f60d6411fb034d618dfbc4e6e6c9999d7",
            "LICENSE": "6c081431591d9df696c82dc598fe1423765b8a299b200ed00b281afd0f64c490",
        },
        stem="highlight",
    ),
    # What the build of markdown-it contains; only the licences are kept.
    Library(
        "entities",
        "8.1.0",
        "BSD-2-Clause",
        "e9a27d66db0d0a6f2d76454219d94f5729ae2a29f08ab06c92e5f6eaa37cbe68",
        {
            "LICENSE": "cb992345949ccd6e8394b2cd6c465f7b897c864f845937dbf64e8997f389e164",
        },
    ),
    Library(
        "linkify-it",
        "6.1.0",
        "MIT",
        "780a9e8232ea7e4c9f04348e2e2a567485c34abed805a15cfff8fff2029076b8",
        {
            "LICENSE": "95e3f7f0e81e9b4940cdfaa1956aaff5e4dfd2fb1565041e7c78eb9a606f23e3",
        },
    ),
    Library(
        "mdurl",
        "2.1.0",
        "MIT",
        "23fc27c3d70e776c3aa40ec019c2be21ef43ed33b73f8476ada8715c5aabd11d",
        {
            "LICENSE": "6b6a356c4337e2446841f30f3cdf7e7023af8c5260b5e347c0f987b9f6aa2644",
        },
    ),
    Library(
        "punycode.js",
        "2.3.1",
        "MIT",
        "8768d89aa6359164220014ba575e1464e3ddff11bedff1cc268e39a21f7324a8",
        {
            "LICENSE-MIT.txt": "483acb265f182907d1caf6cff9c16c96f31325ed23792832cc5d8b12d5f88c8a",
        },
    ),
    Library(
        "uc.micro",
        "3.0.0",
        "MIT",
        "23a2704905d2f7a773f89c97be1102a4a2eb3a69b58c0e8c326a649c75552981",
        {
            "LICENSE.txt": "483acb265f182907d1caf6cff9c16c96f31325ed23792832cc5d8b12d5f88c8a",
        },
    ),
)
