"""Finds the files of a model by its name: a path, a name on the Hugging Face hub, or "tiny".

A path that exists always wins, and huggingface_hub is imported only for names that are not paths.
Its cache, its environment variables (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE) and its
progress bars work as usual.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from glob import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import (
    CheckpointAccessError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointIncompleteError,
    CheckpointMissingError,
    UserInputError,
    closest,
    first_line,
    some,
)
from ..paths import local_path
from ..progress import is_on
from .directory import choose, no_weights
from .files import os_error
from .formats import SUFFIXES
from .save.durable import save_error
from .sidecars import dense_weights, sidecar_kind

BESIDE = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*processor_config.json",
    "additional_chat_templates/*.jinja",
    "modules.json",
    "*sentence_*.json",
    "[0-9]_*.json",
    "[0-9]_*/*.json",
    "maxjax_digests.json",
    "adapter_config.json",
)
"""Patterns of the small files that are read with the weights, including sentence-transformers'."""

# The weights of a LoRA adapter; the first that exists is used.
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_INDEX = re.compile(r"(.*)\.(safetensors|bin)\.index(\.[\w-]+)?\.json", re.DOTALL)
_GGUF_PART = re.compile(r"(.*-)\d{5,}(-of-\d{5,}\.gguf)", re.DOTALL)
# The folder in which sentence-transformers keeps the transformer, if not beside modules.json.
_FOLDER = re.compile(r"[0-9]_\w+")


def needed(repo: str, names: Sequence[str], file: str | None = None) -> list[str]:
    """The files of a repository to download: the small ones, and the weights in one format.

    Args:
        repo: the name of the repository, for messages.
        names: all files of the repository, with "/" between folders.
        file: the file with the weights, if the user named one.

    Raises:
        CheckpointMissingError: ``file`` does not exist, or no file has weights.
        CheckpointFormatError: the weights are in a format that is not supported, or in several GGUF
            files, of which one must be named.

    Example:
        >>> needed("org/name", [
        ...     "README.md", "config.json", "model.safetensors", "onnx/model.onnx",
        ...     "original/consolidated.00.pth", "pytorch_model.bin", "tf_model.h5"])
        ['config.json', 'model.safetensors']
    """
    if file is not None:
        if file not in names:
            others = some([n for n in names if n.endswith(".gguf")], 5) or "no GGUF file"
            raise CheckpointMissingError(
                f"the repository has no file {file!r}",
                path=repo, found=others, hint="Pass the name of an existing file.",
            )  # fmt: skip
        weights = _parts(file, names)
    else:
        weights = _weights(repo, names)
    # Vocabulary files have some megabytes: they are needed only without another tokenizer.
    has_one = "tokenizer.json" in names or any(name.endswith(".gguf") for name in weights)
    small = [name for name in names if any(fnmatchcase(name, pattern) for pattern in BESIDE)]
    small += [name for name in names if not has_one and sidecar_kind(name) == "vocabulary"]
    return sorted({*small, *weights, *dense_weights(names)})


def place(repo: str, downloaded: Sequence[str], present: Sequence[str]) -> str:
    """The file to open in a folder that contains the files ``present``; "" to open the folder itself.

    A directory with weights in two formats is ambiguous; the files ``downloaded`` decide which are used.

    Example:
        >>> place("o/n", ["model.safetensors"], ["model.safetensors"])
        ''
        >>> place("o/n", ["config.json", "m.gguf"], ["config.json", "m.gguf", "other.gguf"])
        'm.gguf'
    """
    first = _weights(repo, downloaded)
    gguf = [name for name in present if name.endswith(".gguf")]
    index = [name for name in first if name.endswith(".json")]
    single = gguf and "/" not in first[0] and (first[0].endswith(".gguf") or len(first) == 1)
    return first[0] if single else index[0] if gguf and index else ""


def _weights(repo: str, names: Sequence[str]) -> list[str]:
    top = [name for name in names if "/" not in name]
    gguf = [name for name in names if name.endswith(".gguf")]
    found = choose(repo, [name for name in top if name not in gguf])
    if not found:
        found = _in_folder(repo, names) or _one_gguf(repo, gguf)
    found = found or [name for name in _ADAPTERS if name in top][:1]
    if not found:
        raise no_weights(repo, top, [])
    return sorted({part for name in found for part in _parts(name, names)})


def _in_folder(repo: str, names: Sequence[str]) -> list[str]:
    """The weights of a transformer that ``modules.json`` places in a subfolder."""
    folders = sorted({name.split("/")[0] for name in names if name.count("/") == 1})
    for folder in folders if "modules.json" in names else []:
        if _FOLDER.fullmatch(folder):
            start = f"{folder}/"
            inside = [name.removeprefix(start) for name in names if name.startswith(start)]
            if found := choose(f"{repo}/{folder}", inside):
                return [start + name for name in found]
    return []


def _one_gguf(repo: str, names: Sequence[str]) -> list[str]:
    """The only GGUF file, or the first of the only set of parts."""
    top = [name for name in names if "/" not in name]
    try:
        found = choose(repo, top)
    except CheckpointFormatError:
        found = []
    if names and not found:
        raise CheckpointFormatError(
            "the repository has several GGUF files"
            if top else "the repository has GGUF files in subfolders only",
            path=repo, expected="the name of one", found=some(names, 5),
            hint=f"Add its name: {repo}/{names[0]}.",
        )  # fmt: skip
    return found


def _parts(file: str, names: Sequence[str]) -> list[str]:
    """A file with weights, with all files of its index or of its set of parts."""
    if match := _INDEX.fullmatch(file):
        stem, end = match[1], match[2]
        part = re.compile(rf"{re.escape(stem)}-\d+-of-\d+\.{end}", re.DOTALL)
        parts = [name for name in names if part.fullmatch(name)]
        folder = file.rpartition("/")[0]
        others = [n for n in names if n.endswith(f".{end}") and n.rpartition("/")[0] == folder]
        return [file, *(parts or others)]
    if match := _GGUF_PART.fullmatch(file):
        return [n for n in names if n.startswith(match[1]) and n.endswith(match[2])]
    return [file]


TINY = "tiny"
"""The name of the small model that maxjax includes."""

_PART = r"\w(?:[\w.-]*\w)?"
_NAME = re.compile(
    rf"({_PART}/{_PART})(?:/([^@\\]+\.gguf))?(?:@(\w[\w./+-]*))?", re.ASCII | re.DOTALL
)
_LONGEST = 96
_TOKEN = "Log in with `hf auth login`, or set HF_TOKEN"


class HubName(NamedTuple):
    """A repository on the hub, one file of it, and a branch, tag or commit."""

    repo: str
    file: str | None = None
    revision: str | None = None

    @property
    def url(self) -> str:
        """The web page of the repository."""
        return f"https://huggingface.co/{self.repo}"


def hub_name(text: str) -> HubName | None:
    """Parses a name on the hub; None if it can only be a path.

    Names are ``org/name`` and ``org/name/file.gguf``, each optionally followed by ``@revision``.
    Text in the form of a path (``./a/b``, ``/a/b``, ``a/b/``), or with the suffix of a file of
    weights, is a path.

    Example:
        >>> hub_name("org/name@v1.0")
        HubName(repo='org/name', file=None, revision='v1.0')
        >>> hub_name("org/name/q4.gguf")
        HubName(repo='org/name', file='q4.gguf', revision=None)
        >>> [hub_name(path) for path in ("name", "./org/name", "a/b/c", "dir/model.gguf")]
        [None, None, None, None]
    """
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    repo, file, revision = match.groups()
    if "--" in repo or ".." in repo or repo.endswith(".git") or len(repo) > _LONGEST:
        return None  # the hub allows no such names
    if os.path.splitext(repo)[1].lower() in (*SUFFIXES, ".json"):
        return None
    folders = (file or "x").split("/")
    is_path = file is not None and Path(repo.split("/")[0]).is_dir()
    if is_path or any(part in ("", ".", "..") for part in folders):
        return None
    return HubName(repo, file, revision)


class Access(NamedTuple):
    """How the hub is reached, with huggingface_hub's meanings.

    Attributes:
        token: token, True for the saved one, False for none; None for the saved one or HF_TOKEN.
        cache_dir: directory of downloaded files; None for huggingface_hub's own.
        local_files_only: whether only the cache is used.
    """

    token: str | bool | None = None
    cache_dir: str | os.PathLike[str] | None = None
    local_files_only: bool = False

    @property
    def cache(self) -> str:
        """The directory of downloaded files."""
        from huggingface_hub import constants

        return os.fspath(self.cache_dir or constants.HF_HUB_CACHE)


PLAIN = Access()
"""The access that huggingface_hub's settings and environment variables define."""


def find_model(
    name: str | os.PathLike[str] | None,
    revision: str | None = None,
    *,
    filename: str | None = None,
    access: Access = PLAIN,
) -> Path:
    """Finds the files of a model, and downloads those of a hub name unless they are in the cache.

    Args:
        name: a path; or, if there is no such path, a name on the hub, ``org/name`` or
            ``org/name/file.gguf``; or ``"tiny"`` or None for the small model that comes with
            maxjax. A Path is never taken for a name.
        revision: a branch, tag or commit on the hub, as in ``org/name@revision``.
        filename: the file with the weights, of a repository or directory.
        access: how the hub is reached.

    Returns:
        The path of a directory or of a GGUF file.

    Raises:
        CheckpointMissingError: there is no such path, repository, revision or file; or it is not in
            the hub's cache, and the hub cannot be reached.
        CheckpointAccessError: the hub denies access, or the cache is not writable.
        CheckpointFormatError: the repository has several GGUF files, and none is named.
        CheckpointIncompleteError: the download was interrupted.
        CheckpointSaveError: the cache is full or read-only.
        UserInputError: ``revision`` is given with a path or is malformed; the name is not a valid
            path; ``filename`` contradicts it.
        TypeError: ``name`` is neither a str nor a Path.

    Example:
        >>> find_model("nowhere")
        Traceback (most recent call last):
        ...
        maxjax.errors.CheckpointMissingError: nowhere: no such file or directory. Check the path; a
        name on the Hugging Face hub has two parts: org/name.
    """
    path = None if name is None else Path(local_path(name))
    if access.cache_dir is not None:
        local_path(access.cache_dir)
    found = hub_name(name) if isinstance(name, str) else None
    if path is None or (name == TINY and not _exists(path)):
        path = Path(str(files("maxjax"))) / TINY
    if _exists(path):
        if revision is not None:
            raise UserInputError(
                f"revision={revision!r} needs a name on the hub, but {path} is a path"
            )
        if filename is not None and not path.is_dir():
            raise UserInputError(f"filename={filename!r} is given, and {path} is a file already")
        return path if filename is None else path / filename
    if found is None:
        single = isinstance(name, str) and re.fullmatch(_PART, name, re.ASCII)
        raise CheckpointMissingError(
            "no such file or directory", path=path,
            hint=f"Did you mean '{TINY}', the model in the package?" if _means_tiny(name)
            else "Check the path; a name on the Hugging Face hub has two parts: org/name." if single else None,
        )  # fmt: skip
    if filename is not None and found.file not in (None, filename):
        raise UserInputError(
            f"the name says file {found.file!r}, but filename={filename!r} is passed: drop one of them"
        )
    revision = _one_revision(found.revision, revision)
    return fetch(found._replace(file=filename or found.file, revision=revision), access)


def checkpoint_path(given: Any) -> str:
    """The path of a checkpoint that a caller gives: a path, a name as for :func:`find_model`, or open ``Weights``.

    Raises:
        CheckpointError, UserInputError, TypeError: as for :func:`find_model`. A path is not looked for.

    Example:
        >>> checkpoint_path("nowhere/model.gguf")
        'nowhere/model.gguf'
    """
    given = getattr(given, "_path", given)  # of Weights
    is_name = isinstance(given, str) and (_means_tiny(given) or hub_name(given) is not None)
    if is_name and not _exists(Path(local_path(given))):
        return os.fspath(find_model(given))
    return local_path(given)


def _means_tiny(name: Any) -> bool:
    """Return whether a name is that of the model in the package, or a misspelling of it."""
    return isinstance(name, str) and closest(name, [TINY]) is not None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError as error:
        raise os_error(error, os.fspath(path), "opening failed") from error
    except (OSError, ValueError) as error:  # the name is too long, or has a NUL in it
        raise UserInputError(f"the path cannot be used: {error}") from None


def _one_revision(in_name: str | None, given: str | None) -> str | None:
    if given is not None and not (isinstance(given, str) and re.fullmatch(r"\w[\w./+-]*", given)):
        raise UserInputError(f"revision={given!r} is not a branch, tag or commit")
    if given is not None and in_name not in (None, given):
        raise UserInputError(
            f"the name says revision {in_name!r}, but revision={given!r} is passed: drop one of them"
        )
    return given or in_name


# --- the hub ------------------------------------------------------------------------------


def fetch(name: HubName, access: Access = PLAIN) -> Path:
    """The path of a repository in the hub's cache, after downloading what is missing.

    Without a connection, or with HF_HUB_OFFLINE=1, the cached copy is used as it is. The errors are
    those of :func:`find_model`.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import RevisionNotFoundError

    if access.local_files_only:
        return _cached(name, access, LookupError("local_files_only=True"))
    seconds = constants.HF_HUB_ETAG_TIMEOUT
    try:
        hub = HfApi(library_name="maxjax", token=access.token)
        info = hub.model_info(name.repo, revision=name.revision, timeout=seconds)
    except RevisionNotFoundError:
        raise _missing(name, f"the repository has no revision {name.revision!r}") from None
    except Exception as error:  # its class may be huggingface_hub's, httpx's or the system's
        return _cached(name, access, error)
    names = [file.rfilename for file in info.siblings or []]
    wanted = needed(name.repo, names, name.file)
    try:
        with _bars():
            folder = _snapshot(name, access, allow_patterns=[escape(file) for file in wanted])
    except Exception as error:
        raise _download_error(name, access, error) from error
    return _opened(name, folder, wanted)


@contextmanager
def _bars() -> Iterator[None]:
    """A context in which huggingface_hub shows its bars only if maxjax shows its own."""
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if is_on() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _cached(name: HubName, access: Access, cause: Exception) -> Path:
    """The path of the cached copy, after the hub failed to answer or refused with ``cause``."""
    try:
        local = access._replace(local_files_only=True)
        folder = _snapshot(name, local, allow_patterns=list(BESIDE))
    except Exception as error:
        partly = getattr(error, "snapshot_path", None) is not None
        raise _unavailable(name, access, cause, partly) from cause
    try:
        wanted = needed(name.repo, _files(folder), name.file)
    except CheckpointError:
        raise _unavailable(name, access, cause, partly=True) from cause
    return _opened(name, folder, wanted)


def _opened(name: HubName, folder: Path, wanted: list[str]) -> Path:
    return folder / (name.file or place(name.repo, wanted, _files(folder)))


def _files(folder: Path) -> list[str]:
    return [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]


def _snapshot(name: HubName, access: Access, **options: Any) -> Path:
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            name.repo, revision=name.revision, library_name="maxjax", **access._asdict(), **options
        )
    )


# --- errors of the hub as one-line CheckpointErrors ---------------------------------------


def _unavailable(name: HubName, access: Access, cause: Exception, partly: bool) -> CheckpointError:
    """The error for a repository that neither the hub nor the cache can provide."""
    from huggingface_hub import constants

    refused = _refused(name, cause)
    if refused is not None:
        return refused
    there = "only a part of it is in the cache" if partly else "not in the cache"
    if access.local_files_only:
        return _missing(
            name, f"{there} of the hub, {access.cache}, and local_files_only=True forbids downloads",
            hint="Leave local_files_only out to download it.",
        )  # fmt: skip
    if constants.HF_HUB_OFFLINE:
        return _missing(
            name, f"{there} of the hub, and HF_HUB_OFFLINE forbids downloads",
            hint="Unset HF_HUB_OFFLINE to download it.",
        )  # fmt: skip
    return _missing(
        name, f"no such path, and {there} of the hub, which cannot be reached", found=_line(cause),
        hint="Check the connection, or pass a local directory. HF_HUB_OFFLINE=1 skips the wait.",
    )  # fmt: skip


def _refused(name: HubName, error: Exception) -> CheckpointError | None:
    """The error for a request that the hub refused; None if it did not refuse."""
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        return CheckpointAccessError(
            "the repository is gated: its owner must grant you access", path=name.repo,
            hint=f"Request access at {name.url}. {_TOKEN}.",
        )  # fmt: skip
    if isinstance(error, errors.RepositoryNotFoundError):
        return _missing(
            name, "no such path, and no such repository on the hub, or a private one",
            hint=f"Check the name. {_TOKEN} for a private one.",
        )  # fmt: skip
    if isinstance(error, errors.HFValidationError):
        return _missing(name, "no such path, and not a valid name on the hub")
    if isinstance(error, errors.DisabledRepoError):
        return CheckpointAccessError("the hub has disabled the repository", path=name.repo)
    if status in (401, 403):
        return CheckpointAccessError(
            f"the hub denies access ({status})",
            path=name.repo,
            hint=f"{_TOKEN} to a token that may read it.",
        )
    return None


def _download_error(name: HubName, access: Access, error: Exception) -> CheckpointError:
    """The error for a download that failed after it began."""
    refused = _refused(name, error)
    if refused is not None:
        return refused
    cache, doing = access.cache, f"{name.repo} cannot be stored in the cache"
    local = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)
    for one in _chain(error):
        if isinstance(one, OSError) and one.errno in local:
            return save_error(one, cache, doing)
    if "os error 28" in str(error) or "No space left" in str(error):  # raised by compiled code
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return save_error(full, cache, doing)
    return CheckpointIncompleteError(
        "the download was interrupted", path=name.repo, found=_line(error),
        hint="Run it again: the download continues where it stopped.",
    )  # fmt: skip


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}".removesuffix(": ")


def _missing(name: HubName, problem: str, **more: Any) -> CheckpointMissingError:
    return CheckpointMissingError(problem, path=name.repo, **more)
