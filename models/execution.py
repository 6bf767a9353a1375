"""How a replica executes the network: with which kernels and in which dtype, chosen once at its start and said aloud.

``reference`` runs the training modules in float32. ``torch`` and ``native`` run the request side in their dtype and
the candidate side as a packed stack of fused layers (``kernels.wukong_layer``); with ``native`` a few events of one
user go through all layers of the history encoder in one call as well (``kernels.event_layer``). Scores leave in float32
either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels import wukong_layer
from kernels.native import status
from kernels.packed_linear import PackedLinear, probe_dtypes
from models.execution_config import REFERENCE, BackendChoice, Execution, Precision, PrecisionChoice
from models.kunlun import Personal, Window
from models.layers.layout import CandidateLayout
from models.network import RankingNetwork, State
from models.sequence_encoder import FUSED_EVENTS_MAX, Ages, EncodedLayer, Events
from models.wukong import Contributions, InteractionLayer
from shared.errors import ConfigError
from shared.schema.speculative import HitLevel

_IN_ONE_CALL = f"candidates, and up to {FUSED_EVENTS_MAX} events of one user, go through all layers in one call"

DTYPES: dict[Precision, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def choose_execution(backend: BackendChoice = "auto", precision: PrecisionChoice = "auto") -> Execution:
    """Choose kernels and dtype for this machine; a choice that is not ``auto`` is kept or refused, never replaced.

    Args:
        backend: ``auto``: the native library with bfloat16 where it can run, else stock torch.
        precision: ``auto``: the faster of both by a timed product: without the instructions for it, bfloat16 is
            hundreds of times slower than float32.

    Raises:
        ConfigError: the machine cannot do what was asked, or the backend has no such dtype.
    """
    if backend == "reference":
        if precision == "bfloat16":
            raise ConfigError("backend reference has float32 only", field="precision", value=precision)
        return REFERENCE
    native = status()
    if backend == "native":
        if not native.available:
            raise ConfigError(f"backend native cannot be used: {native.reason}", field="backend", value=backend)
        if precision == "float32":
            raise ConfigError("backend native has bfloat16 only", field="precision", value=precision)
        return Execution("native", "bfloat16", f"as configured: {_IN_ONE_CALL}")
    reasons = []
    chosen = precision
    if chosen == "auto":
        rates = probe_dtypes()
        chosen = "bfloat16" if rates.dtype == torch.bfloat16 else "float32"
        reasons.append(f"probe: bfloat16 {rates.bf16_gflops:.0f}, float32 {rates.fp32_gflops:.0f} GFLOP/s")
    if backend == "auto" and native.available and chosen == "bfloat16":
        return Execution("native", chosen, ", ".join([*reasons, f"native library found: {_IN_ONE_CALL}"]))
    if backend == "auto":
        reasons.append(f"native: {native.reason}" if not native.available else "native has bfloat16 only")
    return Execution("torch", chosen, ", ".join(reasons) or "as configured")


class FusedNetwork:
    """A network whose candidate side is a packed stack; the interface is that of ``RankingNetwork``.

    Weights are packed when a depth is first used: later changes of the network do not reach it.

    Args:
        network: In float32; it stays as it is.
        execution: ``torch`` or ``native``.

    Raises:
        ConfigError: the network has biases.
    """

    def __init__(self, network: RankingNetwork, execution: Execution) -> None:
        if execution.backend == "reference":
            raise ConfigError("backend reference is the network itself", field="backend", value="reference")
        check_fusable(network)
        self.config = network.config
        self.execution = execution
        self._dtype = DTYPES[execution.precision]
        self._network = network
        self._request_side = network if self._dtype == torch.float32 else _copy(network, self._dtype)
        if execution.backend == "native":
            self._request_side.encoder.use_native()
        self._counters = [PackedLinear(cast(nn.Linear, network.counters[index]).weight) for index in (0, 2)]
        self._speculative = PackedLinear(network.speculative.weight)
        self._embedding = PackedLinear(network.heads.speculative.weight)
        self._stacks: dict[int, wukong_layer.PackedLayers] = {}
        self._heads = {
            depth: (PackedLinear(head.hidden.weight.to(self._dtype)), PackedLinear(head.logits.weight))
            for depth, head in ((depth, network.heads.exit(depth)) for depth in self.config.exits)
        }

    def encode(self, features: Tensor, events: Events, ages: Ages, dense: Tensor, taste: Tensor) -> State:
        """Compute the request side of B requests: see ``RankingNetwork.encode``; the state is float32."""
        features, dense, taste = (x.to(self._dtype) for x in (features, dense, taste))
        return _widened(self._request_side.encode(features, events.to(self._dtype), ages, dense, taste))

    def encode_events(
        self,
        features: Tensor,
        events: Events,
        before: Sequence[Window] | None,
        num_before: int,
        personal: Sequence[Personal] | None = None,
    ) -> list[EncodedLayer]:
        """Encode events that follow others: see ``RankingNetwork.encode_events``; in the stack's dtype."""
        features, events = features.to(self._dtype), events.to(self._dtype)
        return self._request_side.encode_events(features, events, before, num_before, personal)

    def finish(
        self, features: Tensor, encoded: Sequence[tuple[Tensor, Tensor]], ages: Ages, dense: Tensor, taste: Tensor
    ) -> State:
        """Compute what is left when the events are encoded: see ``RankingNetwork.finish``; the state is float32."""
        features, dense, taste = (x.to(self._dtype) for x in (features, dense, taste))
        encoded = [(keys.to(self._dtype), values.to(self._dtype)) for keys, values in encoded]
        return _widened(self._request_side.finish(features, encoded, ages, dense, taste))

    def first_pass(self, state: State, pooled: Tensor, counters: Tensor, layout: CandidateLayout) -> Tensor:
        """Score C candidates cheaply, in float32: see ``RankingNetwork.first_pass``."""
        return self._network.first_pass(state, pooled, counters, layout)

    def full_pass(
        self,
        state: State,
        pooled: Tensor,
        counters: Tensor,
        speculative: Tensor | None,
        levels: Tensor | None,
        layout: CandidateLayout,
        depth: int | None = None,
        first: Tensor | None = None,
    ) -> Tensor:
        """Score C candidates with the layers before an exit and its heads: see ``RankingNetwork.full_pass``."""
        depth = self.config.num_layers if depth is None else depth
        first = self.first_pass(state, pooled, counters, layout) if first is None else first
        tokens = self._candidate_tokens(pooled, counters, speculative, levels)
        hidden = self._hidden(state, tokens, layout, depth)
        return first + self._heads[depth][1](hidden.float())

    def embed(self, state: State, pooled: Tensor, counters: Tensor, layout: CandidateLayout) -> Tensor:
        """Return the speculative embeddings [C, E] of candidates: see ``RankingNetwork.embed``."""
        tokens = self._candidate_tokens(pooled, counters, None, None)
        return torch.tanh(self._embedding(self._hidden(state, tokens, layout, self.config.num_layers).float()))

    def _candidate_tokens(
        self, pooled: Tensor, counters: Tensor, speculative: Tensor | None, levels: Tensor | None
    ) -> Tensor:
        """Return the tokens that enter the first layer, candidate-major: [C, n, D] in the stack's dtype."""
        presence = self._network.presence
        made = self._counters[1](self._counters[0](counters, activation="relu"))
        if speculative is None or levels is None:
            extra = presence[int(HitLevel.NONE)].expand(len(pooled), -1)
        else:
            extra = self._speculative(speculative) + functional.embedding(levels, presence)
        return torch.cat([pooled, made[:, None], extra[:, None]], dim=1).to(self._dtype)

    def _hidden(self, state: State, tokens: Tensor, layout: CandidateLayout, depth: int) -> Tensor:
        """Run the layers before an exit and its hidden layer: [C, hidden] in the stack's dtype."""
        stack = self._stack(depth)
        given = [_given(state, index) for index in range(depth)]
        packed = wukong_layer.give(stack, given, mask=state.get("mask"))
        index = None if layout.request_index is None else layout.request_index.to(torch.int32)
        flat = wukong_layer.rank(stack, tokens, packed, index).flatten(1)
        part = state[f"head{depth}"]
        hidden = self._heads[depth][0]
        if layout.request_index is None:
            return hidden(flat, part[0].contiguous(), "relu")
        return functional.relu(hidden(flat).float() + layout.rows(part)).to(self._dtype)

    def _stack(self, depth: int) -> wukong_layer.PackedLayers:
        if depth not in self._stacks:
            layers = [cast(InteractionLayer, self._network.layers[index]) for index in range(depth)]
            weights = [_weights(layer) for layer in layers]
            backend = self.execution.backend
            self._stacks[depth] = wukong_layer.pack(weights, backend=backend, dtype=self._dtype)
        return self._stacks[depth]


def executed(network: RankingNetwork, execution: Execution) -> RankingNetwork | FusedNetwork:
    """Return what runs a network: itself, or its packed form."""
    return network if execution.backend == "reference" else FusedNetwork(network, execution)


def check_fusable(network: RankingNetwork) -> None:
    """Refuse a network that the packed stack cannot compute.

    Raises:
        ConfigError: it has biases.
    """
    if network.config.bias:
        raise ConfigError("a network with biases runs on backend reference only", field="backend", value="bias")


def _widened(state: State) -> State:
    return {name: x.float() if x.is_floating_point() else x for name, x in state.items()}


def _copy(network: RankingNetwork, dtype: torch.dtype) -> RankingNetwork:
    fresh = RankingNetwork(network.config)
    fresh.load_state_dict(network.state_dict())
    return fresh.requires_grad_(False).eval().to(dtype)


def _weights(layer: InteractionLayer) -> wukong_layer.LayerWeights:
    block = layer.candidate
    return wukong_layer.LayerWeights(
        query_tokens=block.query_tokens,
        query=block.query.weight,
        attention_out=block.attention_out.weight,
        mixtures=block.mixtures,
        norm_products=block.norm_products.weight,
        up=block.up.weight,
        down=block.down.weight,
        linear=block.linear,
        residual=block.residual,
        norm=block.norm.weight,
        num_heads=layer.num_heads,
        num_residual_tokens=block.sizes.num_residual_tokens,
        product_epsilon=block.norm_products.epsilon,
    )


def _given(state: State, index: int) -> wukong_layer.LayerGiven:
    own = Contributions.of(state, index)
    return wukong_layer.LayerGiven(**{field.name: getattr(own, field.name) for field in fields(own)})
