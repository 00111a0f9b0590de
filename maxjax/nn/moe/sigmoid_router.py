"""Written for files of Modular MAX: routers with sigmoid scores, and a bias of the choice only (DeepSeek-V3).

maxjax itself does not import it: its models call ``maxjax.nn.moe.route``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...dtype import DType
from ...graph.device import DeviceRef
from ...graph.ops.lift import lift
from ...graph.value import TensorValue, unwrap, wraps
from ...graph.weight.weight import Weight
from ..linear import Linear
from .gate import MoEGate
from .routing import Routing


@lift
def moe_router_group_limited(
    expert_scores: Any,
    expert_bias: Any,
    n_routed_experts: int,
    n_experts_per_tok: int,
    n_groups: int,
    topk_group: int,
    norm_weights: bool,
    routed_scaling_factor: float,
) -> tuple[Any, Any]:
    """Chooses the experts of each token with the highest scores, from the best groups of experts.

    Args:
        expert_scores: scores after the sigmoid, ``[N, X]``.
        expert_bias: numbers ``[X]`` that are added to the scores for the choice only.
        n_routed_experts: number X of experts.
        n_experts_per_tok: number k of experts for each token.
        n_groups: number of equal groups, which are ranked by the sum of their two highest scores.
        topk_group: number of groups from which a token chooses its experts.
        norm_weights: whether shares are divided by their sum; with one group they always are, as in MAX.
        routed_scaling_factor: factor of all shares, applied last.

    Returns:
        Indices in int32 and shares in the dtype of the scores, ``[N, k]`` each.

    Raises:
        ValueError: the shapes, or the numbers of experts and groups, do not fit each other.

    Example:
        >>> scores, bias = jnp.array([[0.25, 0.75, 0.5, 0.125]]), jnp.zeros(4)
        >>> [x.tolist() for x in moe_router_group_limited(scores, bias, 4, 2, 2, 1, True, 4.0)]
        [[[1, 0]], [[3.0, 1.0]]]
    """
    if expert_scores.shape[-1] != n_routed_experts or expert_bias.shape != (n_routed_experts,):
        raise ValueError(
            f"scores and bias are of {n_routed_experts} experts, not {list(expert_scores.shape)} and "
            f"{list(expert_bias.shape)}"
        )
    route = Routing(
        n_experts_per_tok, "scores", norm_weights or n_groups == 1, factor=routed_scaling_factor,
        groups=n_groups, chosen_groups=topk_group,
    )  # fmt: skip
    route.check(n_routed_experts)
    chosen, shares = route(expert_scores, expert_bias)
    return chosen.astype(jnp.int32), shares.astype(expert_scores.dtype)


class SigmoidTopKRouter(MoEGate):
    """A gate with sigmoid scores: it chooses the k highest sums of score and bias; shares come from scores alone.

    Args (in MAX's order):
        devices, hidden_dim, num_experts, num_experts_per_token: as for MoEGate.
        dtype: dtype of the weight, unless ``gate_dtype`` is given.
        norm_topk_prob: without effect: shares are always divided by their sum, as in MAX.
        gate_dtype: dtype of the weight, or None for ``dtype``.
        correction_bias_dtype: dtype of the bias, of the scores and of the shares.
        routed_scaling_factor: factor of all shares, applied last.
        linear_cls, is_sharding: as for MoEGate.

    Attributes:
        gate_score: Linear with weight ``[X, hidden_dim]``.
        e_score_correction_bias: Weight ``[X]``.

    Example:
        >>> gate = SigmoidTopKRouter([DeviceRef.CPU()], 2, 3, 1, DType.float32)
        >>> _ = gate.load_state_dict({"gate_score.weight": jnp.ones((3, 2)),
        ...                           "e_score_correction_bias": jnp.array([0.0, 0.5, 0.25])})
        >>> [x.tolist() for x in gate(jnp.ones((1, 2)))]
        [[[1]], [[1.0]]]
    """

    def __init__(
        self,
        devices: Sequence[DeviceRef],
        hidden_dim: int,
        num_experts: int,
        num_experts_per_token: int,
        dtype: Any,
        norm_topk_prob: bool = True,
        gate_dtype: Any = None,
        correction_bias_dtype: Any = DType.float32,
        routed_scaling_factor: float = 1.0,
        linear_cls: Callable[..., Any] = Linear,
        is_sharding: bool = False,
    ):
        gate_dtype = gate_dtype or dtype
        super().__init__(
            devices, hidden_dim, num_experts, num_experts_per_token, gate_dtype, is_sharding, linear_cls
        )  # fmt: skip
        self.norm_topk_prob, self.routed_scaling_factor = norm_topk_prob, routed_scaling_factor
        self.gate_dtype, self.correction_bias_dtype = gate_dtype, correction_bias_dtype
        self.e_score_correction_bias = Weight(
            "e_score_correction_bias",
            correction_bias_dtype,
            (num_experts,),
            self.devices[0] if self.devices else DeviceRef.CPU(),
        )

    def _gate_logits(self, hidden_states: Any) -> Any:
        """Scores before the sigmoid, ``[N, X]``; a subclass may override it."""
        return self.gate_score(hidden_states)

    def __call__(self, hidden_state: Any) -> tuple[Any, Any]:
        """``[N, hidden_dim]`` → indices of experts and their shares, ``[N, k]`` each."""
        logits = jnp.asarray(unwrap(self._gate_logits(hidden_state)))
        scores = jax.nn.sigmoid(logits.astype(DType.of(self.correction_bias_dtype).np))
        chosen, shares = moe_router_group_limited(
            scores, jnp.asarray(self.e_score_correction_bias), self.num_experts,
            self.num_experts_per_token, 1, 1, self.norm_topk_prob, self.routed_scaling_factor,
        )  # fmt: skip
        return (
            (TensorValue(chosen), TensorValue(shares)) if wraps(hidden_state) else (chosen, shares)
        )
