"""``maxjax.load``: opens a checkpoint and returns a model that is ready to run, and its tokenizer.

``models.build`` makes the lazy Module, and its ``load_state_dict`` fills it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..dtype import DType
from ..elsewhere import unknown_argument
from ..errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointMismatchError,
    UnsupportedModelError,
    UserInputError,
    releasing,
    some,
)
from ..graph import compile_cache
from ..graph.placement.arrays import platform_of
from ..graph.weights import FileWeights, GGUFWeights, load_weights
from ..images import ImageProcessor
from ..kernels.packed_product import ACTIVATIONS
from ..lockstep import Lockstep
from ..models import LanguageModel, PretrainedModel, VisionPart, build, config_beside
from ..models.gguf import config_of
from ..models.gguf.mmproj import processor_settings
from ..models.gguf.sampling import sampling_config
from ..models.gguf.tokenizer.read import end_ids
from ..models.parts.vision import VisionModel
from ..models.pooling import Dense, Pooling, gguf_pooling
from ..models.sentence_files import read_pooling
from ..models.weights import model_facts, named_dtype, set_activations
from ..progress import last_part, task
from ..storage.files import closed_on_error, is_there
from ..storage.hub import Access, find_model
from ..storage.limits import Limits, allowing
from ..storage.open import beside_of, orbax_checkpoint
from ..storage.save.beside import Files, settled, waiting
from ..storage.table import Verify
from ..text.tokenizer.tokenizer import Tokenizer, gguf_tokenizer, tokenizer_in
from .generate.defaults import read_defaults

if TYPE_CHECKING:
    from ..graph import Model

_LOG = logging.getLogger("maxjax")


@overload
def load(
    path: str | os.PathLike[str],
    *,
    dtype: Any = "auto",
    reduce_dtype: Any = DType.float32,
    mesh: Any = None,
    rules: Mapping[str, Any] | None = None,
    config: Any = None,
    verify: Verify = "auto",
    revision: str | None = None,
    filename: str | None = None,
    mmproj: str | os.PathLike[str] | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    limits: Limits | None = None,
    tokenizer: bool = True,
    tie: bool | None = None,
    mtp: bool = False,
    vision: bool | type[VisionPart] = True,
    activations: Literal["int8", "float"] | None = None,
    compile: None = None,
) -> tuple[PretrainedModel, Tokenizer | None]: ...
@overload
def load(
    path: str | os.PathLike[str],
    *,
    dtype: Any = "auto",
    reduce_dtype: Any = DType.float32,
    mesh: Any = None,
    rules: Mapping[str, Any] | None = None,
    config: Any = None,
    verify: Verify = "auto",
    revision: str | None = None,
    filename: str | None = None,
    mmproj: str | os.PathLike[str] | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    limits: Limits | None = None,
    tokenizer: bool = True,
    tie: bool | None = None,
    mtp: bool = False,
    vision: bool | type[VisionPart] = True,
    activations: Literal["int8", "float"] | None = None,
    compile: Sequence[Any],
) -> tuple[PretrainedModel, Tokenizer | None, Model]: ...
def load(
    path: str | os.PathLike[str],
    *,
    dtype: Any = "auto",
    reduce_dtype: Any = DType.float32,
    mesh: Any = None,
    rules: Mapping[str, Any] | None = None,
    config: Any = None,
    verify: Verify = "auto",
    revision: str | None = None,
    filename: str | None = None,
    mmproj: str | os.PathLike[str] | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    limits: Limits | None = None,
    tokenizer: bool = True,
    tie: bool | None = None,
    mtp: bool = False,
    vision: bool | type[VisionPart] = True,
    activations: Literal["int8", "float"] | None = None,
    compile: Sequence[Any] | None = None,
    **unknown: Any,
) -> Any:
    """Opens a checkpoint and loads its model.

    The layers of a decoder become a LayerStack, which is compiled once. On GPUs each layer keeps
    its own weights instead, because XLA would copy them out of a stack for every token
    (``LanguageModel.stack_for``). The platform of ``mesh``, or of the default device, decides this before
    anything is read. Names, files and results are the same in both forms.

    Args:
        path: a directory with ``config.json`` and weights, a weights file with ``config.json`` in
            the same directory, or a GGUF file, whose metadata includes the config. If there is no
            such path: a name on the Hugging Face hub (``org/name``, ``org/name@revision``
            or ``org/name/file.gguf``), or ``"tiny"``, a small model in the maxjax package. Open
            ``Weights`` stand for their path.
        dtype: dtype of weights and activations: ``"float32"``, ``"bfloat16"``, …; ``"auto"``
            keeps the checkpoint's dtype, and keeps quantised weights quantised.
        reduce_dtype: dtype in which norms, softmax and pooling are computed. With ``"bfloat16"``
            and ``dtype="bfloat16"``, the complete model is computed in 16 bits.
        mesh: the mesh over which the weights are sharded (``make_mesh``); each device reads only
            its shards. All processes that share the mesh must make the call; each reads what its
            devices hold, and all return together.
        rules: sharding rules for the mesh that take precedence over the model's own, as for ``Module.to``.
        config: the content of a ``config.json``, or the path of one, to use instead.
        verify: when to check checksums: ``"auto"`` when a complete tensor is read, which costs
            almost nothing; True always; False never.
        revision: a branch, tag or commit on the hub.
        filename: the weights file to use, if a repository or directory has several.
        mmproj: the file with the vision part of a GGUF file's model, a path or a name on the hub. By default it is the
            ``mmproj*.gguf`` in the directory of the file that fits it.
        token: the token for the hub; True for the one that ``hf auth login`` saved, False for none.
            The default is ``HF_TOKEN``, or the saved token.
        cache_dir: the directory for downloaded files; by default that of huggingface_hub
            (``HF_HUB_CACHE``).
        local_files_only: whether to use only the cache, without a network connection. ``token``,
            ``cache_dir`` and ``local_files_only`` have no effect on a path.
        limits: the limits on weights, config and tokenizer; raise one if an error message says that
            a file exceeds it.
        tokenizer: False loads the model alone, without its tokenizer.
        tie: whether the output head is tied to the embedding table; True ignores a head in the
            file. None follows the config, unless the file has a head with other values: then the
            two are not tied, and a warning says so.
        mtp: whether to load the model's layer of multi-token prediction too, with which
            ``speculation="mtp"`` guesses tokens. By default it is left out.
        vision: whether to load the vision part of a vision-language model too, with which it takes pictures; False
            loads the text model alone. A class of your own (a subclass of ``maxjax.models.VisionPart``) is made and
            loaded in place of maxjax's.
        activations: how kernels for CPUs multiply with quantised weights: ``"int8"`` rounds the
            activations to 8 bits in groups of 32 numbers, much as llama.cpp does; ``"float"`` keeps
            float activations, which takes several times as long. The default, None, is
            ``"int8"`` for a model on CPUs. Gradients and exported programs always use floats.
        compile: one spec for each argument of the model, as for ``Module.compile``: the program for
            these arguments is compiled in another thread while the weights are read.

    Returns:
        The model and its tokenizer, which is None if there is none or ``tokenizer=False``; of a model of images and
        texts it has the image processor as ``tokenizer.images``, and of a model of images alone the image processor
        is in its place. With ``compile`` the compiled program is the third value.

    Raises:
        CheckpointError: the checkpoint is missing, corrupt or does not match the model; the
            subclass says which, and the message says where.
        UnsupportedModelError: the model has an architecture that maxjax does not support.
        UserInputError: an argument is invalid: ``dtype`` or ``reduce_dtype`` is not a float dtype,
            ``activations`` is neither "int8" nor "float", ``revision`` is given for a path, ``rules``
            do not fit the model or have no mesh, ``mtp`` is not supported for the model, or ``vision`` is neither a
            bool nor a class of vision parts.
        TypeError: an argument is unknown; the message suggests the right name if it can.
        ProgramMismatchError: the checkpoint or the mesh is not the same in all processes.
        PeerFailedError, PeerLostError: another process could not load its part, or has ended.
    """
    for name in unknown:
        raise unknown_argument(load, name)
    compile_cache.enable()
    spread = [NamedSharding(mesh, PartitionSpec())] if isinstance(mesh, Mesh) else []
    with Lockstep("load", spread) as together:
        cast_to = None if dtype == "auto" else _float_type("dtype", dtype)
        reduce = _float_type("reduce_dtype", reduce_dtype)
        if activations not in (None, *ACTIVATIONS):
            raise UserInputError(f"activations must be 'int8' or 'float', not {activations!r}")
        if path is None:  # find_model would take it for "tiny"
            raise TypeError("path must be a str or a Path, not NoneType")
        if rules is not None and mesh is None:
            raise UserInputError("rules= need a mesh: load(path, mesh=..., rules=...)")
        if compile is not None and not isinstance(compile, Sequence):
            raise TypeError(
                f"compile is a list with a spec for each argument of the model, not a {type(compile).__name__}"
            )
        path = path._path if isinstance(path, FileWeights) else path
        name = str(path)
        access = Access(token, cache_dir, local_files_only)
        path = find_model(path, revision, filename=filename, access=access)
        part = None if mmproj is None else find_model(mmproj, access=access)
        compared = not together.is_shared

        def once() -> Any:
            nonlocal compared
            weights, model, text = _prepared(
                path,
                part,
                config,
                verify,
                cast_to,
                reduce,
                mesh,
                rules,
                tie,
                mtp,
                vision,
                activations,
                tokenizer,
            )
            with weights:
                if not compared:
                    compared = True  # if this process reads again, the others may not
                    digest = (
                        text.to_dict() if isinstance(text, ImageProcessor) else text and text.digest
                    )
                    checkpoint = weights._family.open_table().sampled()
                    together.agree(checkpoint=checkpoint, tokenizer=digest, **model_facts(model))
                if compile is None:
                    model.load_state_dict(weights, cast=cast_to is not None, tie=tie)
                    return model, text
                with ThreadPoolExecutor(1, "maxjax-compile") as pool:
                    program = pool.submit(model.compile, *compile)
                    model.load_state_dict(weights, cast=cast_to is not None, tie=tie)
            return model, text, program.result()

        with releasing(), allowing(limits), task(f"loading {last_part(name)}", reads=True):
            found = settled(once)
        together.finish()
    return found


def _prepared(
    path: Path,
    mmproj: Path | None,
    config: Any,
    verify: Verify,
    cast_to: Any,
    reduce: Any,
    mesh: Any,
    rules: Any,
    tie: Any,
    mtp: bool,
    vision: bool | type[VisionPart],
    activations: str | None,
    tokenizer: bool,
) -> tuple[FileWeights, PretrainedModel, Tokenizer | None]:
    """Opens the weights of a checkpoint, builds the lazy model for them, and reads the tokenizer."""
    directory = path if path.is_dir() else path.parent
    if step := orbax_checkpoint(path):  # the newest step, which has its own config.json
        directory = Path(step)
    place = _transformer(directory)
    pooling = read_pooling(directory)[0] if place != directory else None
    if path == directory:
        path = place
    if path.is_dir() and not (
        config is not None or step or _has_gguf(path) or waiting(os.fspath(place))
    ):
        config_beside(path)  # says more than that there are no weights, as of a LoRA adapter
    weights = load_weights(path, verify=verify)
    with closed_on_error([weights]):
        if isinstance(weights, GGUFWeights) and vision:
            weights._family.mmproj = _mmproj_of(weights, mmproj, verify)
        elif mmproj is not None:
            raise UserInputError(
                "mmproj= is the vision part of a GGUF file: "
                + ("vision=False leaves it out" if not vision else f"{path} is none")
            )
        if cast_to is None:
            _refuse_float64(weights)
        with weights._beside.files() as folder:
            if place == directory:
                pooling = read_pooling(folder)[0]
            if config is None and not isinstance(weights, GGUFWeights):
                config = config_beside(folder)
            model = build(
                weights,
                config,
                cast_to,
                reduce_dtype=reduce,
                stacked=False,
                tie=tie,
                mtp=mtp,
                vision=vision,
            )
            if isinstance(model, (LanguageModel, VisionModel)):
                model.stack_for(mesh)
            if mesh is not None:
                model.to(mesh, rules=rules)
            set_activations(
                model, activations or ("int8" if platform_of(mesh) == "cpu" else "float")
            )
            if isinstance(weights, GGUFWeights):
                pooling = gguf_pooling(weights.metadata, path=path) or pooling
                pooling = _with_dense(weights, pooling)
            text: Any = _tokenizer(weights, path, folder) if tokenizer else None
            if isinstance(model, VisionModel) and tokenizer:
                text = _with_images(text, model, folder)
            elif text is not None and getattr(model, "vision", None) is not None:
                text.images = _image_processor(folder, weights)
            if pooling is not None:
                model.pooling = pooling
            if isinstance(model, LanguageModel):
                ends, settings = () if text is None else text.eos_ids, model.hf_config
                sampling: dict[str, Any] | None = None
                if isinstance(
                    weights, GGUFWeights
                ):  # the one in its configuration is not the only one
                    ends = end_ids(weights.metadata, path=path) or ends
                    settings = {
                        **(settings or {}),
                        **({"eos_token_id": list(ends)} if ends else {}),
                    }
                    sampling = sampling_config(weights.metadata, path=path)
                model.generation = read_defaults(folder, settings, ends, sampling)
    return weights, model, text


def _with_images(
    text: Tokenizer | None, model: VisionModel, folder: Files
) -> Tokenizer | ImageProcessor | None:
    """The tokenizer, with the image processor of the model; for a model without texts the image processor alone."""
    images = ImageProcessor.in_folder(folder) if "image" in model.takes else None
    if "text" not in model.takes:
        return images
    if text is not None:
        text.images = images
    return text


def _mmproj_of(weights: GGUFWeights, path: Path | None, verify: Verify) -> GGUFWeights | None:
    """Opens the file of the vision part of a model: the given one, or the only one beside it that fits."""
    if path is not None:
        return _opened_mmproj(weights, path, verify)
    place, found = Path(weights._path), {}
    folder = place if place.is_dir() else place.parent
    with closed_on_error(found.values()):
        for file in sorted(folder.glob("*mmproj*.gguf")):
            try:
                found[file.name] = _opened_mmproj(weights, file, verify)
            except (CheckpointError, UnsupportedModelError) as error:
                _LOG.warning("the model takes text alone: %s", error)
        if len(found) > 1:
            raise UserInputError(
                f"{folder} has several files with the vision part of {place.name}: {some(list(found))}. Pass one as "
                "mmproj=, or load the text model alone with vision=False."
            )
    return next(iter(found.values()), None)


def _opened_mmproj(weights: GGUFWeights, path: Path, verify: Verify) -> GGUFWeights:
    """Opens an ``mmproj`` file, which must fit the file of the text half."""
    part = load_weights(path, verify=verify)
    with closed_on_error([part]):
        if not isinstance(part, GGUFWeights):
            raise CheckpointFormatError("not a GGUF file", path=path)
        config_of(weights, part)
    return part


def _image_processor(folder: Files, weights: FileWeights) -> ImageProcessor | None:
    """The image processor of a model's folder or ``mmproj`` file; None if it is not supported, which is warned of."""
    try:
        found = ImageProcessor.in_folder(folder)
        part = weights._mmproj if isinstance(weights, GGUFWeights) else None
        if found is None and isinstance(weights, GGUFWeights) and part is not None:
            return ImageProcessor.of(*processor_settings(weights, part, config_of(weights, part)))
        return found
    except (UserInputError, UnsupportedModelError) as error:
        _LOG.warning("the model takes text alone: %s", error)
        return None


def _with_dense(weights: GGUFWeights, pooling: Pooling | None) -> Pooling | None:
    """The pooling with the dense layers of EmbeddingGemma, which a GGUF file has among its tensors."""
    found = dict(weights._named_data()) if pooling is not None else {}
    layers = [found[name] for name in ("dense_2.weight", "dense_3.weight") if name in found]
    if pooling is None or not layers:
        return pooling
    matrices = [np.asarray(layer.astype(DType.float32)) for layer in layers]
    return replace(pooling, dense=tuple(Dense.of(matrix, None) for matrix in matrices))


def _transformer(directory: Path) -> Path:
    """The directory of the transformer, which ``modules.json`` may place in a subfolder."""
    if not is_there(directory / "modules.json") and not waiting(os.fspath(directory)):
        return directory
    with beside_of(directory).files() as folder:
        return read_pooling(folder)[1]


def _tokenizer(weights: FileWeights, path: Path, directory: Files) -> Tokenizer | None:
    """The tokenizer of a GGUF file, or of the files beside the weights."""
    found = None
    if isinstance(weights, GGUFWeights):
        try:
            found = gguf_tokenizer(weights.metadata, path=path, beside=directory)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(
                f"{error}. Put the model's tokenizer.json into the same directory, or load the model alone"
                " with tokenizer=False."
            ) from None
    return found or tokenizer_in(directory)


def _has_gguf(directory: Path) -> bool:
    """Whether a directory has a GGUF file."""
    return any(file.suffix == ".gguf" for file in directory.iterdir())


def _float_type(option: str, dtype: Any) -> DType:
    found = named_dtype(option, dtype)
    if found not in (DType.float32, DType.bfloat16, DType.float16, DType.float64):
        names = "float32, bfloat16, float16 or float64"
        raise UserInputError(f"{option} must be {names}, not {found.name}")
    if found is DType.float64 and not _has_float64():
        raise UserInputError(
            f"{option}='float64' needs jax_enable_x64: JAX has no float64 without it"
        )
    return found


def _has_float64() -> bool:
    return jax.dtypes.canonicalize_dtype(np.float64) == np.float64


def _refuse_float64(weights: FileWeights) -> None:
    if _has_float64():
        return
    for name, entry in weights._family.open_table().entries.items():
        if entry.dtype in (DType.float64, DType.complex128):
            raise CheckpointMismatchError(
                f"is {entry.dtype.name}, which JAX has with jax_enable_x64 only", path=weights._path,
                tensor=name, hint="Pass dtype='float32', or set jax_enable_x64.",
            )  # fmt: skip
