"""What a file is that no reader takes, such as an archive, by its first bytes."""

from __future__ import annotations

HEAD_BYTES = 512
"""First bytes that are enough to tell every kind; a tar has its mark at byte 257."""
GZIP_MAGIC = b"\x1f\x8b"
LFS_POINTER = b"version https://git-lfs.github.com/spec/v"
_UNPACK = "unpack it ({}), and give what it holds"
_MAGICS: tuple[tuple[int, bytes, str, str], ...] = (
    (0, LFS_POINTER, "a Git LFS pointer", "run git lfs pull in its clone to fetch the content"),
    (0, GZIP_MAGIC, "compressed by gzip", _UNPACK.format("gunzip")),
    (0, b"\x28\xb5\x2f\xfd", "compressed by zstd", _UNPACK.format("unzstd")),
    (0, b"\xfd7zXZ\0", "compressed by xz", _UNPACK.format("unxz")),
    (4, b"1AY&SY", "compressed by bzip2", _UNPACK.format("bunzip2")),
    (0, b"PK\3\4", "a zip archive", _UNPACK.format("unzip")),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK.format("7z x")),
    (0, b"Rar!\x1a\x07", "a rar archive", _UNPACK.format("unrar x")),
    (257, b"ustar\0", "a tar archive", _UNPACK.format("tar -xf")),
    (257, b"ustar  \0", "a tar archive", _UNPACK.format("tar -xf")),
    (0, b"%PDF-", "a PDF", "extract its text (pdftotext), and give that"),
)
"""Place and bytes of a mark, what the file is, and what to do.

Sources: RFC 1952 (gzip) and 8878 (zstd), the .xz format 1.2, bzip2's mark of its first block,
PKWARE's APPNOTE 6.3, 7zFormat.txt, and the RAR 5.0 technote. For tar POSIX pax and GNU tar, for PDF
ISO 32000. For pointers docs/spec.md of git-lfs/git-lfs.
"""


def foreign_kind(head: bytes) -> str | None:
    """Return what a file is and what to do, such as ``is a PDF; ...``; None for other files.

    head: its first HEAD_BYTES.
    """
    for place, magic, kind, remedy in _MAGICS:
        if head.startswith(magic, place):
            return f"is {kind}; {remedy}"
    return None
