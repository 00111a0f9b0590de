"""The largest batch and the longest context: they fit, and the next ones do not."""

import pytest

from maxjax.engine.plan import compiled
from maxjax.engine.plan.compiled import ProgramMemory
from maxjax.engine.plan.report import plan
from maxjax.models import BertConfig, BertModel, Llama, LlamaConfig, Qwen2, Qwen2Config


def llama():
    return Llama(
        LlamaConfig(
            128, 64, 128, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4
        ),
        "bfloat16",
    )


def sliding():
    config = Qwen2Config(
        64,
        16,
        16,
        num_hidden_layers=6,
        num_attention_heads=2,
        layer_types=("sliding_attention",) * 5 + ("full_attention",),
        sliding_window=8,
    )
    return Qwen2(config)


@pytest.mark.sampled
@pytest.mark.parametrize("cache_dtype", [None, "int8"])
@pytest.mark.parametrize("sizes", [None, {"model": 2}, {"data": 2, "model": 8}, {"data": 2, "fsdp": 2}],
                         ids=str)  # fmt: skip
@pytest.mark.parametrize("make", [llama, sliding])
def test_they_fit_and_the_next_do_not(make, sizes, cache_dtype):
    options = {"batch": 4, "length": 100, "cache_dtype": cache_dtype}
    hbm = int(plan(make(), sizes).bytes_per_device * 1.5) + 100_000
    found = plan(make(), sizes, hbm=hbm, **options)
    rows = 1 if sizes is None else sizes.get("data", 1) * sizes.get("fsdp", 1)
    assert found.max_batch % rows == 0 < found.max_batch and 0 < found.max_length

    def fits(**other):
        return plan(make(), sizes, hbm=hbm, **(options | other)).fits

    assert fits(batch=found.max_batch) and not fits(batch=found.max_batch + rows)
    assert fits(length=found.max_length)
    assert found.max_length == 2048 or not fits(length=found.max_length + 1)
    text = str(found)
    assert f"{found.max_batch:,}" in text and f"{found.max_length:,} tokens" in text


def test_no_longer_than_the_model_takes():
    assert plan(llama(), batch=1, length=10, hbm="100GB").max_length == 2048


def test_where_nothing_fits_and_where_it_is_not_known():
    found = plan(llama(), batch=4, length=100, hbm=1000)
    assert (found.max_batch, found.max_length) == (0, 0) and "largest batch" not in str(found)
    for options in ({"batch": 4, "length": 100}, {"hbm": "1GB"}):
        found = plan(llama(), **options)
        assert (found.max_batch, found.max_length) == (None, None)
    bert = BertModel(BertConfig(vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                                num_attention_heads=4))  # fmt: skip
    assert plan(bert, batch=1, length=8, hbm="1GB").max_batch is None


@pytest.fixture
def temporaries(monkeypatch):
    """temporaries(function of batch and length): what compiled programs are said to need."""

    def install(needed):
        asked = []

        def measured(program, model, mesh, *, batch, length, cache_dtype):
            asked.append((program, batch, length))
            found = needed(batch, length) if program == "read" else 0
            if found is None:
                return ProgramMemory(program, refused="too large")
            return ProgramMemory(program, temporaries=found)

        monkeypatch.setattr(compiled, "compiled_memory", measured)
        return asked

    return install


def test_temporaries_are_measured_at_two_sizes(temporaries):
    needed = lambda batch, length: 50_000 + 3_000 * batch + 20 * length
    asked = temporaries(needed)
    base = plan(llama(), {"model": 2})
    hbm = base.bytes_per_device + 500_000
    found = plan(llama(), {"model": 2}, batch=2, length=64, hbm=hbm, compile="cpu:2")
    cache = lambda b, s: plan(llama(), {"model": 2}, batch=b, length=s).cache_bytes_per_device
    taken = lambda b, s: base.bytes_per_device + cache(b, s) + needed(b, s)
    assert taken(found.max_batch, 64) <= hbm < taken(found.max_batch + 1, 64)
    assert taken(2, found.max_length) <= hbm < taken(2, found.max_length + 1)
    # The planned sizes, both programs; then the one that needs most, once for each question.
    assert asked[:2] == [("decode", 2, 64), ("read", 2, 64)]
    assert [one[0] for one in asked[2:]] == ["read"] * 2


def test_without_a_second_size_they_grow_in_proportion(temporaries):
    temporaries(lambda batch, length: 10_000 if (batch, length) == (2, 64) else None)
    base = plan(llama(), {"model": 2})
    hbm = base.bytes_per_device + 500_000
    found = plan(llama(), {"model": 2}, batch=2, length=64, hbm=hbm, compile="cpu:2")
    row = plan(llama(), {"model": 2}, batch=1, length=64).cache_bytes_per_device
    assert found.max_batch == 500_000 // (row + 5_000)
