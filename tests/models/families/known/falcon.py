"""Falcon: 7B, 40B, 180B, Falcon 2 and Falcon-RW."""

from tests.models.decoders import SMALL
from tests.models.families.cases import Case

LAST = ("transformer.ln_f.weight", "transformer.ln_f.bias")
ABSENT = ("intermediate_size", "num_key_value_heads")
SIZES = {key: value for key, value in SMALL.items() if key not in ABSENT}
NEW = {"new_decoder_architecture": True, "num_kv_heads": 2}


def falcon(name, gguf=True, **settings):
    kind = "falcon", "FalconForCausalLM", "FalconConfig"
    return Case(*kind, {**SIZES, **settings}, name, last=LAST, is_whole=True, gguf=gguf)


CASES = [
    falcon("40b", **NEW),
    falcon("7b", multi_query=True, tie_word_embeddings=False),
    falcon("11b", **NEW, num_ln_in_parallel_attn=1, rope_theta=500042.0, ffn_hidden_size=72),
    falcon("rw", False, alibi=True, multi_query=False, parallel_attn=False, bias=True),
    falcon("biased", False, alibi=True, num_attention_heads=8, hidden_size=64, **NEW),
    falcon("sequential", multi_query=False, parallel_attn=False, bias=True, gguf=False),
]
