"""The packed formats' names and block sizes, as MAX 26.7 gives them."""

import copy
import dataclasses
import pickle

import gguf
import pytest

from maxjax.graph.quantization import BlockParameters, QuantizationConfig, QuantizationEncoding

Q = QuantizationEncoding


def test_table():
    assert {q.value: (q.name, q.is_gguf) for q in list(Q)[:5]} == {
        "Q4_0": ("q4_0", True),
        "Q4_K": ("q4_k", True),
        "Q5_K": ("q5_k", True),
        "Q6_K": ("q6_k", True),
        "GPTQ": ("gptq", False),
    }
    assert [q.value for q in Q][5:] == "Q8_0 MXFP4 Q4_1 Q5_0 Q5_1 IQ4_NL IQ4_XS".split()
    assert str(Q.Q4_0) == "QuantizationEncoding.Q4_0"
    assert repr(Q.GPTQ) == "<QuantizationEncoding.GPTQ: 'GPTQ'>"


@pytest.mark.parametrize("q", [q for q in Q if q.is_gguf], ids=str)
def test_blocks_are_gguf_s(q):
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[q.value]]
    assert (q.elements_per_block, q.block_size) == (elements, size)
    assert q.block_parameters == BlockParameters(elements, size)


@pytest.mark.parametrize("name", ["block_parameters", "elements_per_block", "block_size"])
def test_gptq_has_no_block(name):
    with pytest.raises(KeyError, match="GPTQ"):
        getattr(Q.GPTQ, name)


def test_lookup_is_upper_case_only():
    assert Q("Q4_K") is Q["Q4_K"] is Q.Q4_K
    with pytest.raises(ValueError, match="'q4_k' is not a valid QuantizationEncoding"):
        Q("q4_k")
    assert Q.Q4_0 != "Q4_0"


@pytest.mark.parametrize("q", Q, ids=str)
def test_copies_are_the_member(q):
    assert pickle.loads(pickle.dumps(q)) is copy.deepcopy(q) is q


def test_config():
    config = QuantizationConfig("gptq", 4, 128)
    assert repr(config) == (
        "QuantizationConfig(quant_method='gptq', bits=4, group_size=128, desc_act=False, sym=False)"
    )
    assert config != dataclasses.replace(config, sym=True)
    assert {config: 1}[QuantizationConfig("gptq", bits=4, group_size=128)] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.bits = 3
