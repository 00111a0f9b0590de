"""Detection of a file's real format from its first bytes, whatever its name.

A file with a known suffix is read as that format or refused; this module explains the refusal and
suggests the right suffix.
"""

from __future__ import annotations

import re

from ..errors import CheckpointError, CheckpointFormatError, CheckpointUnsafeError
from .formats import FORMATS, PYTORCH, SAFETENSORS, Format

_DOWNLOAD = "The download gave an error page instead of the file: download it again."
_RENAME = "Rename it so that its name ends in {}."
_DOWNLOAD_AGAIN = "Download the file again."
_ONLY = "A pickle can run any code. Only pickles of PyTorch are read, and none is executed."

# Files that no reader supports: (pattern of the first bytes, what the file is, what to do).
_FOREIGN = [
    (
        rb"version https?://(git-lfs|hawser)",
        "git-lfs pointer",
        "The content was not downloaded: run `git lfs pull` in the repository.",
    ),
    (rb"PK(\x03\x04|\x05\x06)", "zip archive", "Unpack it first."),
    (rb"\x89HDF\r\n", "HDF5", "Convert it to safetensors."),
    (rb"\x1f\x8b", "gzip", "Decompress it first."),
    (rb"\x28\xb5\x2f\xfd", "zstd", "Decompress it first."),
    (rb"\xfd7zXZ\x00", "xz", "Decompress it first."),
    (rb".{257}ustar", "tar archive", "Unpack it first."),
    (rb"(\xef\xbb\xbf)?\s*<(!doctype|html|head|body|!--)", "HTML page", _DOWNLOAD),
    (rb"(\xef\xbb\xbf)?\s*<\?xml", "XML document", _DOWNLOAD),
    (rb"\x7fELF", "ELF program", _DOWNLOAD_AGAIN),
]
# The same for all formats too, in the order of the search.
_SIGNS: list[tuple[re.Pattern[bytes], str, str]] = [
    (re.compile(pattern, re.DOTALL | re.IGNORECASE), what, hint)
    for pattern, what, hint in [
        *(
            (pattern, what, _RENAME.format(format.suffix))
            for format in FORMATS
            for what, pattern in format.signs.items()
        ),
        *_FOREIGN,
    ]
]

# The start of files from torch.save before version 1.6: pickle protocol 2 and a magic number.
_PYTORCH = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."

# Number of first bytes that ``sniff`` needs.
SNIFF_BYTES = 4096


def sniff(start: bytes) -> str | None:
    """The kind of a file that begins with ``start``, or None if it is unknown.

    It is "git-lfs pointer", "GGUF", "zip archive", "pickle", "HTML page", "gzip" or another kind.

    Example:
        >>> sniff(b"version https://git-lfs.github.com/spec/v1"), sniff(b"GGUF" + bytes(20))
        ('git-lfs pointer', 'GGUF')
    """
    return next((what for sign, what, _ in _SIGNS if sign.match(start)), None)


def is_safetensors(start: bytes, size: int) -> bool:
    """Whether a file of ``size`` bytes begins with the length of a header that fits in it, and the header."""
    return start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= size - 8


def safetensors_instead(
    path: str, start: bytes, size: int, expected: str
) -> CheckpointFormatError | None:
    """The error for a safetensors file that was to be ``expected``; None if it is none."""
    if not is_safetensors(start, size):
        return None
    return CheckpointFormatError(
        "the file is a safetensors file",
        path=path,
        offset=0,
        expected=expected,
        found="safetensors",
        hint=_RENAME.format(SAFETENSORS.suffix),
    )


def format_of(start: bytes) -> Format | None:
    """The format of a file that begins with ``start``; None if it is not recognised.

    Example:
        >>> format_of(b"GGUF" + bytes(20)).name
        'gguf'
    """
    what = sniff(start)
    if what == "zip archive":
        kind = _archive(start)
        return kind[1] if kind else PYTORCH
    return next((format for format in FORMATS if what in format.signs), None)


def foreign(path: str, start: bytes, expected: str) -> CheckpointError | None:
    """The error for a file that is recognisably not ``expected``; None if nothing shows that.

    For a pickle it is a CheckpointUnsafeError that names the first global it would import.
    """
    for sign, what, hint in _SIGNS:
        if sign.match(start):
            if what == "pickle":
                return _pickle(path, start, expected)
            if what == "zip archive" and (kind := _archive(start)):
                what, hint = f"zip archive ({kind[0]})", _RENAME.format(kind[1].suffix)
            return CheckpointFormatError(
                f"the file is {_named(what)}",
                path=path,
                offset=0,
                expected=expected,
                found=what,
                hint=hint,
            )
    return None


def _named(what: str) -> str:
    article = "an" if what.startswith(("HDF5", "HTML", "XML", "ELF")) else "a"
    return f"{article} {what}{' file' if what in ('GGUF', 'HDF5') else ''}"


def _archive(start: bytes) -> tuple[str, Format] | None:
    """The kind and format of a zip archive, by the name of its first member."""
    name = start[30 : 30 + int.from_bytes(start[26:28], "little")].decode("latin-1")
    kinds = ((what, ends, format) for format in FORMATS for what, ends in format.members.items())
    return next(((what, format) for what, ends, format in kinds if name.endswith(ends)), None)


# A pickled global: two lines (protocols 0 to 3), or two short strings for STACK_GLOBAL.
_GLOBAL = re.compile(rb"c([A-Za-z_][\w.]*)\n([A-Za-z_][\w.]*)\n")
_STACK_GLOBAL = re.compile(
    rb"\x8c.([A-Za-z_][\w.]*)(?:\x94)?\x8c.([A-Za-z_][\w.]*)(?:\x94)?\x93", re.DOTALL
)


def _pickle(path: str, start: bytes, expected: str) -> CheckpointError:
    found = [m for m in (_GLOBAL.search(start), _STACK_GLOBAL.search(start)) if m]
    first = min(found, key=lambda match: match.start(), default=None)
    wants = b".".join(first.groups()).decode("ascii") if first else None
    torch = start.startswith(_PYTORCH)
    what = "PyTorch checkpoint (pickle)" if torch else "pickle"
    return CheckpointUnsafeError(
        f"the file is a {what}" + (f" that would import and may call '{wants}'" if wants else ""),
        path=path,
        offset=first.start() if first else 0,
        expected=expected,
        found=what,
        hint=_RENAME.format(PYTORCH.suffix) + " Its code is not executed." if torch else _ONLY,
    )
