"""What a file really is, from its first bytes, whatever it is called.

A file is read as what its name says or not at all: this explains the refusal, and says what name
the file should have.
"""

from __future__ import annotations

import re

from ..errors import CheckpointError, CheckpointFormatError, CheckpointUnsafeError
from .formats import FORMATS, PYTORCH, Format

_FETCH = "The download gave an error page instead of the file: fetch it again."
_RENAME = "Rename it so that its name ends in {}."
_REFETCH = "Fetch the file again."
_ONLY = "A pickle can run any code: only those of PyTorch are read, and they are not run."

# What no reader reads by its first bytes: (pattern, what it is, what to do).
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
    (rb"(\xef\xbb\xbf)?\s*<(!doctype|html|head|body|!--)", "HTML page", _FETCH),
    (rb"(\xef\xbb\xbf)?\s*<\?xml", "XML document", _FETCH),
    (rb"\x7fELF", "ELF program", _REFETCH),
]
# The same of every format too, in the order asked.
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

# What torch.save wrote before version 1.6: protocol 2 and the format's number.
_PYTORCH = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."

# Bytes that ``sniff`` wants to see.
SNIFF_BYTES = 4096


def sniff(start: bytes) -> str | None:
    """What a file that begins with ``start`` really is, or None when nothing fits.

    Gives "git-lfs pointer", "GGUF", "zip archive", "pickle", "HTML page", "gzip" and so on.

    Example:
        >>> sniff(b"version https://git-lfs.github.com/spec/v1"), sniff(b"GGUF" + bytes(20))
        ('git-lfs pointer', 'GGUF')
    """
    return next((what for sign, what, _ in _SIGNS if sign.match(start)), None)


def format_of(start: bytes) -> Format | None:
    """The format of a file that begins with ``start``; None of one that has no sign.

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
    """The error for a file that is recognisably not ``expected``; None when it is not.

    A pickle gives CheckpointUnsafeError with the first global it would import.
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
    """What a zip archive is by the name of its first member."""
    name = start[30 : 30 + int.from_bytes(start[26:28], "little")].decode("latin-1")
    kinds = ((what, ends, format) for format in FORMATS for what, ends in format.members.items())
    return next(((what, format) for what, ends, format in kinds if name.endswith(ends)), None)


# A global by name and newline (protocols 0 to 3), or two short strings that STACK_GLOBAL takes.
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
        hint=_RENAME.format(PYTORCH.suffix) + " It is read without being run." if torch else _ONLY,
    )
