"""Compiled programs of a plan: they are those that generate runs, and their memory is counted."""

import json

import jax
import numpy as np
import pytest

import maxjax
from maxjax.engine.generate.request import Prompt, Request
from maxjax.engine.generate.stream import scheduler_for
from maxjax.engine.plan import compiled
from maxjax.engine.plan.compiled import (
    ProgramMemory,
    abstract_pool,
    compiled_memory,
    placeholder_of,
)
from maxjax.engine.plan.report import plan
from maxjax.errors import UserInputError
from maxjax.lockstep import Lockstep
from maxjax.models import BertConfig, BertModel, Llama, LlamaConfig
from maxjax.nn.layer.observe.programs import ProgramObserver
from scripts.bench_plan import write_sparse
from tests.fill import filled

SIZES = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64}


def llama(**options):
    return Llama(
        LlamaConfig(
            **SIZES, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, **options
        )
    )


@pytest.fixture(scope="module")
def loaded():
    return filled(llama(max_position_embeddings=256))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sizes", [{"model": 2}, {"data": 2, "model": 4}], ids=str)
@pytest.mark.parametrize("cache_dtype", [None, "int8"])
def test_the_pool_is_that_of_generate(sizes, cache_dtype):
    mesh = maxjax.make_mesh(**sizes)
    model = filled(llama(max_position_embeddings=256)).to(mesh)
    pool = generating(model, [[1, 2], [3]], 62, cache_dtype).memory.arrays.pool
    placeholders = abstract_pool(placeholder_of(model, mesh), 2, 64, cache_dtype)
    assert jax.tree.structure(placeholders) == jax.tree.structure(pool)
    for (path, real), one in zip(
        jax.tree.leaves_with_path(pool), jax.tree.leaves(placeholders), strict=True
    ):
        assert (one.shape, one.dtype) == (real.shape, real.dtype), path
        assert one.sharding.is_equivalent_to(real.sharding, real.ndim), path


def generating(model, prompts, new, cache_dtype=None):
    """The scheduler of ``maxjax.generate`` for some prompts."""
    request = Request(model, None, new, None, (), None, {})
    options = {"chunk": 512, "cache_dtype": cache_dtype, "together": Lockstep("generate", ())}
    return scheduler_for(request, [Prompt(ids, None, False) for ids in prompts], 2, **options)


def test_the_memory_is_that_of_the_programs_that_run(monkeypatch):
    mesh = maxjax.make_mesh(model=2)
    model = filled(llama(max_position_embeddings=4096)).to(mesh)
    length = 2560  # more than is read as tokens of several texts
    found = plan(model, mesh, batch=2, length=length, compile="cpu:8")
    ran = {}
    run = ProgramObserver.run

    def noted(self, together, program, *args, rows, counts, width, keeps=True, **static):
        if args[2].shape[-1] in (2, 512):  # the largest of its kind
            ran[program.__name__] = program.lower(self._model, *args, **static)
        return run(
            self,
            together,
            program,
            *args,
            rows=rows,
            counts=counts,
            width=width,
            keeps=keeps,
            **static,
        )

    monkeypatch.setattr(ProgramObserver, "run", noted)
    ids = [[*np.arange(length - 2) % 100, 1], [3]]
    maxjax.generate(model, None, [[int(i) for i in one] for one in ids], max_new_tokens=8)
    for one in found.programs:
        real = ran[one.program].compile().memory_analysis()
        assert one.temporaries == real.temp_size_in_bytes
        held = found.bytes_per_device + found.cache_bytes_per_device
        assert held <= one.arguments <= held + 8192
    assert [one.program for one in found.programs] == ["decode", "read"]
    assert found.temporaries_per_device == max(
        one.temporaries + one.results for one in found.programs
    )
    assert found.device == "cpu:8" and found.hbm is None and found.fits is None


def test_temporaries_count(loaded, monkeypatch):
    real, kept = compiled.compiled_memory, {}

    def once(program, *args, **sizes):
        """The same programs of the plans below are compiled once."""
        if (key := (program, *sizes.items())) not in kept:
            kept[key] = real(program, *args, **sizes)
        return kept[key]

    monkeypatch.setattr(compiled, "compiled_memory", once)
    options = {"batch": 2, "length": 64, "compile": "cpu:8"}
    before = jax.tree.leaves(loaded)
    found = plan(loaded, {"model": 2}, **options)
    assert all(a is b for a, b in zip(before, jax.tree.leaves(loaded), strict=True))
    held = found.bytes_per_device + found.cache_bytes_per_device
    total = held + found.temporaries_per_device
    assert plan(loaded, {"model": 2}, hbm=total, **options).fits is True
    small = plan(loaded, {"model": 2}, hbm=total - 1, **options)
    assert small.fits is False and "temporaries" in small.why
    other = small.suggestion
    assert other.bytes_per_device + other.cache_bytes_per_device < held
    text = str(found)
    assert "bytes (" in text and "of temporaries, compiled in" in text
    assert json.loads(json.dumps(found.as_dict()))["programs"][0]["program"] == "decode"


def test_a_checkpoint_is_compiled_as_load_would_hold_it(tmp_path, monkeypatch):
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 128, "hidden_size": 32,
              "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
              "num_key_value_heads": 2, "max_position_embeddings": 128}  # fmt: skip
    write_sparse(tmp_path, config, 1)
    asked = []
    real = Llama.stack_for
    monkeypatch.setattr(
        Llama, "stack_for", lambda self, place: asked.append(place) or real(self, place)
    )
    found = plan(tmp_path, compile="cpu:2", batch=1, length=16)
    assert asked == [maxjax.make_mesh(model=2)] and found.mesh == {"model": 2}
    narrow = plan(tmp_path, compile="cpu:2", batch=1, length=16, dtype="float32")
    assert narrow.programs[0].arguments > 1.8 * found.programs[0].arguments
    monkeypatch.setattr(
        compiled, "compiled_memory", lambda program, *_, **__: ProgramMemory(program, temporaries=0)
    )
    assumed = plan(tmp_path, compile="cpu:2")
    assert "one sequence of 128 tokens" in assumed.notes[-1]
    assert assumed.cache_bytes_per_device == 8 * found.cache_bytes_per_device


REFUSAL = """RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory
required exceeds available HBM (15.75G). See https://openxla.org/xla/errors/error_1000 for more details."""


def test_a_compiler_that_refuses(loaded, monkeypatch):
    class Lowered:
        def compile(self):
            raise jax.errors.JaxRuntimeError(self.text)

    Lowered.text = REFUSAL
    monkeypatch.setattr(compiled, "lowered", lambda *_, **__: Lowered())
    found = plan(loaded, {"model": 2}, batch=2, length=64, hbm="1GiB", compile="cpu:8")
    assert found.fits is False and found.max_batch is None
    said = "Ran out of memory on HBM, the total memory required exceeds available HBM (15.75G)."
    assert found.why == f"the compiler says: {said}"
    assert found.temporaries_per_device is None and said in str(found)
    held = found.bytes_per_device + found.cache_bytes_per_device
    other = found.suggestion
    assert other.bytes_per_device + other.cache_bytes_per_device < held
    Lowered.text = "INTERNAL: a defect"
    with pytest.raises(jax.errors.JaxRuntimeError, match="a defect"):
        plan(loaded, {"model": 2}, batch=2, length=64, compile="cpu:8")


def test_what_does_not_fit_is_not_compiled(loaded, monkeypatch):
    monkeypatch.setattr(compiled, "lowered", None)
    found = plan(loaded, {"model": 2}, batch=2, length=64, hbm=1000, compile="cpu:8")
    assert found.fits is False and found.programs == ()
    assert "no program was compiled" in found.notes[-1]


def test_what_cannot_be_compiled(loaded, tmp_path):
    bert = BertModel(BertConfig(vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                                num_attention_heads=4))  # fmt: skip
    with pytest.raises(UserInputError, match="BertModel is not a language model"):
        plan(bert, compile="cpu:2")
    with pytest.raises(UserInputError, match="leave dtype out"):
        plan(loaded, dtype="bf16", compile="cpu:2")
    with pytest.raises(UserInputError, match="are not the same"):
        plan(loaded, device="cpu:4", compile="cpu:2")
    with pytest.raises(UserInputError, match=r"mesh model=8 \(8 devices\): cpu:2 has 2 devices"):
        plan(loaded, {"model": 8}, compile="cpu:2")
    with pytest.raises(UserInputError, match="there is no kind|the kinds are"):
        plan(loaded, compile="b200:8")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nonesuch"}))
    write_sparse(tmp_path, {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
                            "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 8,
                            "architectures": ["None"]}, 1)  # fmt: skip
    with pytest.raises(UserInputError, match="no model for this checkpoint"):
        plan(tmp_path, compile="cpu:2")


def test_no_more_tokens_are_read_than_the_context(monkeypatch):
    seen = {}
    monkeypatch.setattr(compiled, "lowered", lambda *_, **options: seen.update(options) or stop())

    def stop():
        raise InterruptedError

    for length, tokens in ((8192, 512), (100, 128)):
        with pytest.raises(InterruptedError):
            compiled_memory("read", None, None, batch=1, length=length)
        assert seen["tokens"] == tokens
