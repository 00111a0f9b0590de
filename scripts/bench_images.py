"""Pictures: the memory of decoding, and the speed of a vision-language model compared with transformers on torch.

    python scripts/bench_images.py [--quick] [--pairs N]

Memory: the peak of a process above its start while an image processor reads a picture of 6,000 × 4,000 (1,500 × 1,000
with --quick), less its result, in bytes of the picture's RGB; at most 2.2 is wanted.

Speed, with weights that are drawn: a LLaVA with the tower of SigLIP base (93 M) and a Llama of 135 M, in float32 on two
threads. Both prepare the same picture with maxjax's image processor, encode it, read the prompt and give the first
token; in turn, each time with another picture. Then tokens a second after a prompt with a picture compared with a
prompt of as many tokens of text, and the number of programs that further pictures compile, which is 0.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for scripts.peers

import numpy as np

from scripts.peers import installed

THREADS = 2
_IMAGE = 7  # the id of the placeholder


# --- memory -------------------------------------------------------------------------------


def pictures(width: int, height: int) -> Iterator[tuple[str, bytes]]:
    """Files of a picture, by the name of the case."""
    from PIL import Image

    down, across = np.mgrid[:height, :width]
    ramp = np.stack([down % 251, across % 241, (down + across) % 239], -1).astype(np.uint8)
    image = Image.fromarray(ramp)
    exif = Image.Exif()
    exif[0x0112] = 6
    alpha = image.copy()
    alpha.putalpha(128)
    cases: list[tuple[str, Image.Image, str, dict[str, Any]]] = [
        ("PNG", image, "PNG", {"compress_level": 1}),
        ("PNG with alpha", alpha, "PNG", {"compress_level": 1}),
        ("JPEG", image, "JPEG", {}),
        ("JPEG, turned by EXIF", image, "JPEG", {"exif": exif}),
        ("JPEG, progressive", image, "JPEG", {"progressive": True}),
        ("JPEG, progressive, 4:4:4", image, "JPEG", {"progressive": True, "subsampling": 0}),
        ("WebP", image, "WEBP", {"method": 0}),
    ]
    for name, one, format, options in cases:
        file = io.BytesIO()
        one.save(file, format, **options)
        yield name, file.getvalue()


def _kibibytes(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def peak(path: str, small: str) -> float:
    """Bytes above the start at the peak of reading a picture, less those of the result."""
    from maxjax.images import ImageProcessor

    processor = ImageProcessor.of({"image_processor_type": "SiglipImageProcessor"})
    processor(small)  # imports, and buffers that stay
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _kibibytes("VmRSS")
    result = processor(path).pixels
    return (_kibibytes("VmHWM") - before) * 1024 - result.nbytes


def memory(width: int, height: int) -> None:
    """Prints one line for each kind of file."""
    print(f"memory of reading {width:,} × {height:,} pixels, in bytes of its RGB")
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"": (width, height), "small": (64, 48)}
        names = [name for name, _ in pictures(8, 8)]
        for kind, size in sizes.items():
            for i, (_, data) in enumerate(pictures(*size)):
                Path(folder, f"{kind}{i}").write_bytes(data)
        for i, name in enumerate(names):
            paths = [str(Path(folder, f"{kind}{i}")) for kind in sizes]
            command = [sys.executable, __file__, "--peak", *paths]
            began = time.perf_counter()
            found = subprocess.run(command, check=True, capture_output=True, text=True)
            bytes_each = float(found.stdout) / (width * height * 3)
            print(f"  {name:26s} {bytes_each:5.2f}   {time.perf_counter() - began:5.1f} s in all")


# --- speed --------------------------------------------------------------------------------


def settings(is_small: bool) -> tuple[dict[str, Any], int]:
    """The configuration of the model, and the side of its pictures."""
    text = {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }  # fmt: skip
    tower = {
        "model_type": "siglip_vision_model", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
        "num_attention_heads": 12, "image_size": 224, "patch_size": 16, "vision_use_head": False,
    }  # fmt: skip
    if is_small:
        text |= {"vocab_size": 100, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
                 "num_attention_heads": 3, "num_key_value_heads": 1}  # fmt: skip
        tower |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
                  "image_size": 64}  # fmt: skip
    raw = {
        "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "image_token_index": _IMAGE,
        "text_config": text, "vision_config": tower, "vision_feature_layer": -1, "dtype": "float32",
        "vision_feature_select_strategy": "full",
    }  # fmt: skip
    return raw, tower["image_size"]


def write_checkpoint(folder: Path, raw: dict[str, Any], side: int) -> None:
    """Writes a checkpoint with drawn weights, a tokenizer of words and an image processor."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    from maxjax.models import Llama, LlamaConfig
    from maxjax.models.vision.llava import LlavaVision

    text = {key: value for key, value in raw["text_config"].items() if key != "model_type"}
    config = LlamaConfig(**text)
    model = Llama(config, stacked=False)
    model.vision = LlavaVision(raw, config, model.dtype)
    draw = np.random.default_rng(0)
    tensors = {
        model.tensor_names.file_names(name)[0]: draw.normal(0, 0.02, tuple(map(int, weight.shape)))
        for name, weight in model.raw_state_dict().items()
    }
    norms = [name for name in tensors if "norm" in name and name.endswith("weight")]
    tensors |= {name: np.ones_like(tensors[name]) for name in norms}
    # transformers has the text model under this name.
    tensors = {
        re.sub(r"^model\.(?=layers|embed_tokens|norm)", "model.language_model.", name): one.astype(
            np.float32
        )
        for name, one in tensors.items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    words = {f"w{i}": i for i in range(100) if i != _IMAGE} | {"<image>": _IMAGE}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    processor = {
        "processor_class": "LlavaProcessor",
        "image_processor_type": "SiglipImageProcessor",
    }
    beside = {"patch_size": raw["vision_config"]["patch_size"], "vision_feature_select_strategy": "full",
              "image_token": "<image>", "num_additional_image_tokens": 0}  # fmt: skip
    template = (
        "{% for m in messages %}{% for p in m.content %}{% if p.type == 'image' %}<image> {% else %}{{ p.text }}"
        "{% endif %}{% endfor %}{% endfor %}"
    )
    files = {
        "config.json": raw, "tokenizer_config.json": {"chat_template": template},
        "preprocessor_config.json": {**processor, "size": {"height": side, "width": side}},
        "processor_config.json": {"processor_class": "LlavaProcessor", **beside},
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


def torch_runner(folder: Path, processor: Any) -> Callable[[np.ndarray, list[int]], int]:
    """A function that gives transformers' first token for a picture and a prompt."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(THREADS)
    kind = transformers.LlavaForConditionalGeneration
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()

    def run(picture: np.ndarray, ids: list[int]) -> int:
        pixels = torch.from_numpy(processor(picture).pixels)
        with torch.inference_mode():
            output = model(input_ids=torch.tensor([ids]), pixel_values=pixels, logits_to_keep=1)
        return int(output.logits[0, -1].argmax())

    return run


def speed(pairs: int, is_small: bool) -> None:
    """Prints the ratios, and the number of compilations."""
    import jax.monitoring

    import maxjax

    compiled: list[str] = []

    def heard(event: str, seconds: float, **_: Any) -> None:
        compiled.extend([event] * event.endswith("backend_compile_duration"))

    jax.monitoring.register_event_duration_secs_listener(heard)
    with tempfile.TemporaryDirectory() as found:
        folder = Path(found)
        raw, side = settings(is_small)
        write_checkpoint(folder, raw, side)
        model, tokenizer = maxjax.load(folder)
        draw = np.random.default_rng(1)
        words = " ".join(f"w{i}" for i in draw.integers(10, 90, 20))

        def messages(picture: np.ndarray) -> list[dict[str, Any]]:
            parts = [{"type": "image", "image": picture}, {"type": "text", "text": words}]
            return [{"role": "user", "content": parts}]

        def photo() -> np.ndarray:
            return draw.integers(0, 256, (480, 640, 3), dtype=np.uint8)

        def answer(prompt: Any, count: int) -> Any:
            return maxjax.generate(
                model, tokenizer, prompt, max_new_tokens=count, temperature=0, eos_ids=()
            )

        first = answer(messages(photo()), 1)
        ids = list(first.prompt_tokens)
        answer(messages(photo()), 1)
        peer = (
            torch_runner(folder, tokenizer.images) if installed("torch", "transformers") else None
        )
        compiled.clear()
        times, ratios, equal = [], [], 0
        for i in range(pairs + (peer is not None)):
            picture = photo()
            began = time.perf_counter()
            token = answer(messages(picture), 1).tokens[0]
            ours = time.perf_counter() - began
            if peer is not None:
                began = time.perf_counter()
                equal += peer(picture, ids) == token
                if i > 0:  # the first warms it up
                    ratios.append((time.perf_counter() - began) / ours)
            times.append(ours)
        print(
            f"a picture and its prompt of {len(ids)} tokens: {statistics.median(times) * 1e3:.0f} ms"
        )
        if ratios:
            print(f"  transformers on torch takes {statistics.median(ratios):.2f} × as long (wanted: 1.1; "
                  f"{min(ratios):.2f} to {max(ratios):.2f}), the same token {equal} of {len(times)} times")  # fmt: skip
        print(f"  programs compiled for {len(times)} further pictures: {len(compiled)}")

        new = 8 if is_small else 64
        text = [i for i in ids if i != _IMAGE]
        text = (text * len(ids))[: len(ids)]
        rates: list[float] = []
        for i in range(pairs + 1):
            each = []
            for prompt in (messages(photo()), text):
                spent = []
                for count in (1, new + 1):
                    began = time.perf_counter()
                    answer(prompt, count)
                    spent.append(time.perf_counter() - began)
                each.append(new / (spent[1] - spent[0]))
            if i > 0:
                rates.append(each[0] / each[1])
        print(
            f"tokens a second after a picture: {statistics.median(rates):.2f} × those after a text (wanted: 1.0)"
        )


def main() -> None:
    """Runs both parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small picture and a small model")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        print(peak(*options.peak))
        return
    if not installed("PIL"):
        return
    if sys.platform == "linux":
        memory(*((1500, 1000) if options.quick else (6000, 4000)))
    speed(2 if options.quick else options.pairs, options.quick)


if __name__ == "__main__":
    main()
