"""What architectures share: functions for their mathematics, and the base classes of language models.

``attend`` is attention over the tokens of a call and those in the cache, ``rope`` the rotary position embedding,
``run_layers`` the loop over layers. ``LanguageModel`` and ``LanguageModelConfig`` hold what generating text, caches
and checkpoints need. An architecture's own modules are in its file, such as ``maxjax/models/llama.py``.
"""

from ..config import config_field as config_field
from .aliases import alias as alias
from .attention import CAUSAL as CAUSAL
from .attention import alibi_slopes as alibi_slopes
from .attention import attend as attend
from .attention import bidirectional as bidirectional
from .attention import chunked as chunked
from .attention import merge_heads as merge_heads
from .attention import sliding as sliding
from .attention import soft_cap as soft_cap
from .attention import split_groups as split_groups
from .attention import split_heads as split_heads
from .cache import LayerCache as LayerCache
from .cache import Mask as Mask
from .cache import learned_rows as learned_rows
from .cache import no_cache as no_cache
from .config import FULL as FULL
from .config import SLIDING as SLIDING
from .config import LanguageModelConfig as LanguageModelConfig
from .config import check_not_empty as check_not_empty
from .config import constant as constant
from .config import every_nth_is_0 as every_nth_is_0
from .config import layer_count as layer_count
from .config import layer_kinds as layer_kinds
from .config import layers as layers
from .config import refuse as refuse
from .config import rope_layers as rope_layers
from .config import size as size
from .config import with_defaults as with_defaults
from .encoder import Dtypes as Dtypes
from .encoder import Encoder as Encoder
from .encoder import EncoderConfig as EncoderConfig
from .encoder import EncoderOutput as EncoderOutput
from .encoder import Pooler as Pooler
from .encoder import add_embeddings as add_embeddings
from .encoder import add_norm as add_norm
from .encoder import encoder_angles as encoder_angles
from .encoder import layer_norm as layer_norm
from .encoder import positions_past_padding as positions_past_padding
from .encoder import run_encoder as run_encoder
from .encoder import split_fused_features_over_mesh as split_fused_features_over_mesh
from .encoder import split_fused_heads_over_mesh as split_fused_heads_over_mesh
from .heads import AnswerFinder as AnswerFinder
from .heads import ClassificationHead as ClassificationHead
from .heads import FirstTokenClassifier as FirstTokenClassifier
from .heads import MaskedWordHead as MaskedWordHead
from .heads import PooledClassifier as PooledClassifier
from .heads import PredictionHeads as PredictionHeads
from .heads import TextClassifier as TextClassifier
from .heads import TokenClassifier as TokenClassifier
from .heads import start_and_end as start_and_end
from .heads import vocabulary_layer as vocabulary_layer
from .heads import with_head as with_head
from .indexer import top_keys as top_keys
from .language_model import LanguageModel as LanguageModel
from .latent import absorb_keys as absorb_keys
from .latent import expand_values as expand_values
from .layer_loop import replicate_over_mesh as replicate_over_mesh
from .layer_loop import run_layers as run_layers
from .layer_loop import split_features_over_mesh as split_features_over_mesh
from .layer_loop import split_heads_over_mesh as split_heads_over_mesh
from .norm import unit_rms as unit_rms
from .rotary import Angles as Angles
from .rotary import Proportional as Proportional
from .rotary import Rope as Rope
from .rotary import rope as rope
from .rotary import ropes_by_kind as ropes_by_kind
from .rotary import ropes_to_hf as ropes_to_hf
from .shared_kv import SHARED as SHARED
from .shared_kv import kept_or_shared as kept_or_shared
