"""Written for files of Modular MAX: transformer blocks and decoders, at the paths of ``max.nn.transformer``.

maxjax itself does not import it: its decoders are in ``maxjax.models``.
"""

from ...absent import absent as _absent
from .distributed_transformer import DistributedTransformer as DistributedTransformer
from .distributed_transformer import DistributedTransformerBlock as DistributedTransformerBlock
from .outputs import DistributedLogitsPostprocessMixin as DistributedLogitsPostprocessMixin
from .outputs import LogitsPostprocessMixin as LogitsPostprocessMixin
from .outputs import ReturnHiddenStates as ReturnHiddenStates
from .outputs import ReturnLogits as ReturnLogits
from .outputs import distributed_logits_postprocess as distributed_logits_postprocess
from .outputs import logits_postprocess as logits_postprocess
from .sequence import forward_sequential_layers as forward_sequential_layers
from .sequence import forward_sharded_layers as forward_sharded_layers
from .transformer import Transformer as Transformer
from .transformer import TransformerBlock as TransformerBlock

__getattr__ = _absent(__name__)
