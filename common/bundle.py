"""Report of a run in one archive: logs, config, versions and rank table, without secrets."""

from __future__ import annotations

import io
import json
import platform
import re
import socket
import tarfile
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from pathlib import Path

from common.doctor.software import installed_versions
from common.errors import ConfigError, DataError
from common.failures import explain_log, read_ends
from common.files import atomic_write
from common.launcher.rank_process import SHOWN_VARIABLES

MAX_FILE_BYTES = 2 << 20
"""Most bytes of one file: half from its start, half from its end."""
MAX_BYTES = 64 << 20
"""Most bytes of all files, before compression."""
_HIDDEN = "(hidden)"
_PATTERNS = (
    "config.yaml",
    "*.log",
    "*.json",
    "*.jsonl",
    "mf_*/mindformer.log",
    "mf_*/env.log",
    "host_*/mindformer.log",
)
"""Files of a run folder, in the order of their importance."""
_SECRET = re.compile(
    r"\w*KEYS?|\w*TOKENS?|\w*SECRETS?|\w*PASS\w*|PWD|CREDS?|CREDENTIALS?"
    r"|AUTH(?!ORS?$)\w*|O?AUTH2?|COOKIES?|JWT|BEARER|SIG(NATURE)?|AK|SK|PAT",
    re.IGNORECASE,
)
"""Words in the name of a secret. Only whole words match: not KEYBOARD, AUTHOR or data.path."""
_COUNTED = re.compile(r"(^|_)(max|min|num|new|total|mega)(_\w+)?_tokens", re.IGNORECASE)
"""Names that count tokens of text."""
_WORD = re.compile("[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_IN_QUERY = re.compile(r"([?&;])([^=&;\s]*)=[^&;\s]*")
_USER_IN_URL = re.compile(r"(\w://)\S*@")
_USER_WITHOUT_SCHEME = re.compile(r"(?<![^\s,;=])[^\s:/@,;=]+:[^\s/@]+@(?=\S)")
"""``user:secret@host``"""
_AFTER_SCHEME = re.compile(r"\b(Bearer|Basic)\s+\S+", re.IGNORECASE)
"""Credentials after the scheme of an HTTP header."""
_PAIR = re.compile(
    r"""(?P<name>[A-Za-z][\w.-]*)(?P<end>["']?\s*[:=]\s*)(?P<value>"[^"]*"|'[^']*'|(?![{\[(])[^\s,;}\])]+)"""
)
_WHOLE_LINE = re.compile(r"^(\s*(?:-\s+)?)([A-Za-z][\w.-]*)(:\s+)(?!\s*$)(.*)$")
"""A line of YAML, whose value may have several words."""
_OPTION = re.compile(r"(?P<name>--?[A-Za-z][\w-]*)(?P<end>\s+)(?P<value>[^\s-]\S*)")
_KEYS = re.compile(
    r"\b(hf_\w{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|sk-[\w-]{16,}|AKIA[0-9A-Z]{16}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
"""Tokens and keys by their form: Hugging Face, GitHub, OpenAI, AWS, JWT."""
_ADDRESS = re.compile(
    r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?!\w|\.\d)"
    r"|(?<![\w.:])[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7}(?![\w:])"
)


def clean(text: str, names: dict[str, str] | None) -> str:
    """Return a text without secrets, and without addresses unless ``names`` is None.

    names: name of each address, to which new ones are added. With one for all texts, tables and logs still fit
    together.
    """
    text = "\n".join(map(_clean_line, text.split("\n")))
    if names is None:
        return text
    host = socket.gethostname()
    if len(host) > 3 and host != "localhost":
        text = re.sub(rf"\b{re.escape(host)}\b", "this-host", text)
    return _ADDRESS.sub(lambda found: _name(found[0], names), text)


def _clean_line(line: str) -> str:
    if found := _WHOLE_LINE.match(line):
        start, name, between, value = found.groups()
        if _is_hidden(name, value):
            return f"{start}{name}{between}{_HIDDEN}"
    for pattern in (_PAIR, _OPTION):
        line = pattern.sub(_without_value, line)
    line = _USER_IN_URL.sub(rf"\1{_HIDDEN}@", _KEYS.sub(_HIDDEN, line))
    line = _AFTER_SCHEME.sub(rf"\1 {_HIDDEN}", _USER_WITHOUT_SCHEME.sub(f"{_HIDDEN}@", line))
    return _IN_QUERY.sub(lambda found: f"{found[1]}{found[2]}={_HIDDEN}" if _is_secret(found[2]) else found[0], line)


def _name(text: str, names: dict[str, str]) -> str:
    try:
        address = ip_address(text)
    except ValueError:  # a time, a version
        return text
    if address.is_loopback or address.is_unspecified:
        return text
    return names.setdefault(str(address), f"address-{len(names) + 1}")


def _is_secret(name: str) -> bool:
    return not _COUNTED.search(name) and any(_SECRET.fullmatch(word) for word in _WORD.findall(name))


def _is_hidden(name: str, value: str) -> bool:
    """Tell whether a value is secret. Counts of tokens are numbers, not secrets."""
    is_count = re.search(r"tokens?\b|_tokens?_", name, re.IGNORECASE) and re.fullmatch(r"[\d.,eE+]+\w{0,2}", value)
    last = name.lstrip("-").rpartition(".")[2].replace("-", "_")
    return not is_count and last != "PWD" and _is_secret(last)


def _without_value(found: re.Match[str]) -> str:
    if not _is_hidden(found["name"], found["value"].strip("\"'")):
        return found[0]
    quote = found["value"][0] if found["value"][0] in "\"'" else ""
    return f"{found['name']}{found['end']}{quote}{_HIDDEN}{quote}"


def write_bundle(
    target: Path, *, run: Path, table: Path | None, environ: Mapping[str, str], with_addresses: bool = False
) -> list[str]:
    """Write the archive atomically, and return the files that were shortened or left out.

    Raises ConfigError for a target or a run folder that cannot be, StorageError for a full disk.
    """
    if not target.name.endswith((".tar.gz", ".tgz")):
        raise ConfigError(f"--bundle {target}: expected a name that ends with .tar.gz")
    if not run.is_dir():
        raise ConfigError(f"--output_dir {run}: no such folder; give the folder of the run")
    names: dict[str, str] | None = None if with_addresses else {}
    notes, left = list[str](), MAX_BYTES
    with atomic_write(target) as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, text in _texts(run, table, environ, notes):
            data = clean(text, names).encode()
            if len(data) > left:
                notes.append(f"{name}: left out, the archive is full")
                continue
            left -= len(data)
            _add(archive, name, data)
        _add(archive, "left_out.txt", clean("\n".join(notes) + "\n", names).encode())
    return notes


def _texts(run: Path, table: Path | None, environ: Mapping[str, str], notes: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the name in the archive and the text of each part."""
    versions = {"platform": platform.platform(), "python": platform.python_version(), **installed_versions()}
    yield "versions.json", json.dumps(versions, indent=2) + "\n"
    shown = sorted(name for name in environ if SHOWN_VARIABLES.fullmatch(name))
    yield "environment.txt", "".join(f"{name}={environ[name]}\n" for name in shown)
    try:
        yield "explanation.txt", explain_log(run, "en")[0] + "\n" + explain_log(run, "zh")[0]
    except DataError as reason:  # a folder without logs still has a config
        notes.append(f"explanation.txt: {reason}")
    given = environ.get("RANK_TABLE_FILE")
    wanted = table or (Path(given) if given else None)
    if wanted is not None and (text := _read(wanted, "rank_table.json", notes)) is not None:
        yield "rank_table.json", text
    for path in dict.fromkeys(path for each in _PATTERNS for path in sorted(run.glob(each))):
        name = f"run/{path.relative_to(run)}"
        if (text := _read(path, name, notes)) is not None:
            yield name, text


def _read(path: Path, name: str, notes: list[str]) -> str | None:
    """Return the text of a regular file, of a long one its start and end; None for others."""
    if path.is_symlink() or not path.is_file():
        notes.append(f"{name}: not a regular file")
        return None
    try:  # a line that the cut would divide might hide a secret that is not recognised
        text, left_out = read_ends(path, MAX_FILE_BYTES)
    except DataError as error:
        notes.append(f"{name}: {error}")
        return None
    if left_out:
        notes.append(f"{name}: shortened, {left_out:,} bytes in its middle are left out")
    return text


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(f"bundle/{name}")
    member.size = len(data)
    member.mode = 0o600
    archive.addfile(member, io.BytesIO(data))
