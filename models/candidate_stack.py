"""The candidate side of a network's layers, from the first to an exit, as one packed stack of ``kernels.wukong_layer``.

The heads stay in float32 on what the stack gives, so scores leave in float32. Only the stack's own arithmetic depends
on the backend: ``native`` keeps activations in bfloat16.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from kernels import wukong_layer
from kernels.wukong_layer import Backend, LayerGiven, LayerWeights, PackedGiven
from models.layers.layout import CandidateLayout
from models.network import RankingNetwork, State
from models.wukong import Contributions, InteractionLayer


class CandidateStack:
    """Runs candidates through the first layers of a network and the heads after them.

    Args:
        network: The network; later changes of its layers do not reach the stack.
        depth: Interaction layers, an exit of the network.
        backend: Of ``kernels.wukong_layer``.
        dtype: Of the stack's activations.

    Raises:
        KeyError: there is no exit of that depth.
        ValueError: the network has biases, or the backend has no such dtype.
        kernels.native.NativeUnavailableError: ``native`` cannot run here.
    """

    def __init__(
        self, network: RankingNetwork, depth: int, backend: Backend, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        if network.config.bias:
            raise ValueError("a network with bias has no packed stack")
        self._network = network
        self._head = network.heads.exit(depth)
        self._depth = depth
        layers = [cast(InteractionLayer, network.layers[index]) for index in range(depth)]
        self._num_residual = [layer.candidate.sizes.num_residual_tokens for layer in layers]
        self._packed = wukong_layer.pack([_weights(layer) for layer in layers], backend=backend, dtype=dtype)

    def give(self, state: State) -> PackedGiven:
        """Pack what B requests give to their candidates, once for all of them."""
        given = [
            _given(Contributions.of(state, index), num_residual)
            for index, num_residual in enumerate(self._num_residual)
        ]
        return wukong_layer.give(self._packed, given, mask=state.get("mask"))

    def full_pass(
        self,
        state: State,
        given: PackedGiven,
        pooled: Tensor,
        counters: Tensor,
        speculative: Tensor | None,
        levels: Tensor | None,
        layout: CandidateLayout,
    ) -> Tensor:
        """Score C candidates; arguments as in ``RankingNetwork.full_pass``.

        Args:
            state: User state of B requests.
            given: What ``give`` made of it.
            pooled: [C, F, D].
            counters: [C, counter features].
            speculative: [C, E] or None.
            levels: int64 [C] or None.
            layout: Which request each candidate belongs to.

        Returns:
            Logits float32 [C, O].
        """
        tokens = self._network.candidate_tokens(pooled, counters, speculative, levels).transpose(0, 1)
        request = None if layout.request_index is None else layout.request_index.int()
        made = wukong_layer.rank(self._packed, tokens.contiguous(), given, request)
        logits, _ = self._head.rank(made.float().transpose(0, 1), state[f"head{self._depth}"], layout)
        return logits


def _weights(layer: InteractionLayer) -> LayerWeights:
    block = layer.candidate
    return LayerWeights(
        query_tokens=block.query_tokens.detach(),
        query=block.query.weight.detach(),
        attention_out=block.attention_out.weight.detach(),
        mixtures=block.mixtures.detach(),
        norm_products=block.norm_products.weight.detach(),
        up=block.up.weight.detach(),
        down=block.down.weight.detach(),
        # A token of the residual alone is one whose linear row is zero.
        linear=torch.nn.functional.pad(block.linear.detach(), (0, 0, 0, block.sizes.num_residual_tokens)),
        residual=None if block.residual is None else block.residual.detach(),
        norm=block.norm.weight.detach(),
        num_heads=layer.num_heads,
    )


def _given(given: Contributions, num_residual: int) -> LayerGiven:
    return LayerGiven(
        keys=given.keys,
        values=given.values,
        queries=given.queries,
        mixtures=given.mixtures,
        linear=torch.nn.functional.pad(given.linear, (0, 0, 0, num_residual)),
        hidden=given.hidden,
    )
