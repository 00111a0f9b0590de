"""Floor 1. What a file really is, from its first bytes, whatever it is called.

Used only to explain a refusal: a file is read as what its name says or not at all.
Below: errors. Above: the parsers, which ask when their own magic does not fit.
"""

from __future__ import annotations

import re

from ..errors import CheckpointError, CheckpointFormatError, CheckpointUnsafeError

_FETCH = "The download gave an error page instead of the file: fetch it again."
_CONVERT = "Convert it to safetensors."
_REFETCH = "Fetch the file again."

# What the first bytes say, in the order asked: (pattern, what it is, what to do).
_SIGNS: list[tuple[re.Pattern[bytes], str, str]] = [
    (re.compile(pattern, re.DOTALL | re.IGNORECASE), what, hint)
    for pattern, what, hint in [
        (
            rb"version https?://(git-lfs|hawser)",
            "git-lfs pointer",
            "The content was not downloaded: run `git lfs pull` in the repository.",
        ),
        (rb"GGUF|FUGG", "GGUF", "GGUF is not supported yet: use a safetensors version."),
        (rb"PK(\x03\x04|\x05\x06)", "zip archive", _CONVERT),
        (rb"\x80[\x02-\x05]|c[a-z_][\w.]*\n\w+\n|\(lp\d|\(dp\d", "pickle", _CONVERT),
        (rb"\x93NUMPY", "NumPy array (.npy)", _CONVERT),
        (rb"\x89HDF\r\n", "HDF5", _CONVERT),
        (rb"\x1f\x8b", "gzip", "Decompress it first."),
        (rb"\x28\xb5\x2f\xfd", "zstd", "Decompress it first."),
        (rb"\xfd7zXZ\x00", "xz", "Decompress it first."),
        (rb".{257}ustar", "tar archive", "Unpack it first."),
        (rb"(\xef\xbb\xbf)?\s*<(!doctype|html|head|body|!--)", "HTML page", _FETCH),
        (rb"(\xef\xbb\xbf)?\s*<\?xml", "XML document", _FETCH),
        (rb"\x7fELF", "ELF program", _REFETCH),
    ]
]

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


def foreign(path: str, start: bytes, expected: str) -> CheckpointError | None:
    """The error for a file that is recognisably not ``expected``; None when it is not.

    A bare pickle gives CheckpointUnsafeError with the first global it would import.
    """
    for sign, what, hint in _SIGNS:
        if sign.match(start):
            if what == "pickle":
                return _pickle(path, start, expected)
            what = zip_kind(start) if what == "zip archive" else what
            return CheckpointFormatError(
                f"the file is a {what}",
                path=path,
                offset=0,
                expected=expected,
                found=what,
                hint=hint,
            )
    return None


def zip_kind(start: bytes) -> str:
    """A zip archive by the name of its first member."""
    name = start[30 : 30 + int.from_bytes(start[26:28], "little")]
    if name.endswith((b".pkl", b".format_version", b".storage_alignment", b"version")):
        return "zip archive (PyTorch checkpoint)"
    return "zip archive (NumPy .npz)" if name.endswith(b".npy") else "zip archive"


# A global by name and newline (protocols 0 to 3), or two short strings that STACK_GLOBAL takes.
_GLOBAL = re.compile(rb"c([A-Za-z_][\w.]*)\n([A-Za-z_][\w.]*)\n")
_STACK_GLOBAL = re.compile(
    rb"\x8c.([A-Za-z_][\w.]*)(?:\x94)?\x8c.([A-Za-z_][\w.]*)(?:\x94)?\x93", re.DOTALL
)


def _pickle(path: str, start: bytes, expected: str) -> CheckpointError:
    found = [m for m in (_GLOBAL.search(start), _STACK_GLOBAL.search(start)) if m]
    first = min(found, key=lambda match: match.start(), default=None)
    wants = b".".join(first.groups()).decode("ascii") if first else None
    return CheckpointUnsafeError(
        "the file is a pickle" + (f" that would import and may call '{wants}'" if wants else ""),
        path=path,
        offset=first.start() if first else 0,
        expected=expected,
        found="pickle",
        hint="A pickle can run any code and is never opened. Use a safetensors version.",
    )
