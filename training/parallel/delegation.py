"""Data-parallel training with sharded parameters, the small ones of which may be delegated to replication.

A sharded parameter lies in the flat buffer of its module: each worker keeps its slice of it, all workers gather the
whole before a step and scatter the reduced gradient after it, one collective a module each way. Replicated parameters
lie whole on every worker and share one bucket, whose gradients are reduced at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.delegation import THRESHOLD, Delegation, delegate


@dataclass(slots=True)
class Traffic:
    """Collectives of one worker since the last reset.

    Args:
        num_collectives: How many there were.
        num_bytes: Bytes of what was gathered, scattered or reduced, whole buffers.
    """

    num_collectives: int = 0
    num_bytes: int = 0

    def add(self, buffer: Tensor) -> None:
        """Count one collective over a buffer."""
        self.num_collectives += 1
        self.num_bytes += buffer.nbytes


class FlatShards:
    """The sharded parameters of one module, as slices of one flat buffer.

    Args:
        parameters: The parameters, of one dtype, the same on every worker; their storage becomes part of the buffer.
        rank: This worker.
        num_workers: W.
        traffic: Counts the collectives.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], rank: int, num_workers: int, traffic: Traffic) -> None:
        self._parameters = list(parameters)
        self._traffic = traffic
        self._num_workers = num_workers
        size = sum(parameter.numel() for parameter in self._parameters)
        padded = -(-size // num_workers) * num_workers
        self._whole = torch.cat([parameter.detach().flatten() for parameter in self._parameters])
        self._whole = nn.functional.pad(self._whole, (0, padded - size))
        self.shard = nn.Parameter(self._whole.chunk(num_workers)[rank].clone())
        self._bytes = self._whole.untyped_storage().nbytes()
        begin = 0
        for parameter in self._parameters:
            end = begin + parameter.numel()
            parameter.data = self._whole[begin:end].view(parameter.shape)
            begin = end
        self.release()

    def gather(self) -> None:
        """Fill the buffer with all workers' slices; the parameters can be used."""
        self._whole.untyped_storage().resize_(self._bytes)
        dist.all_gather_single(self._whole, self.shard.detach())
        self._traffic.add(self._whole)

    def reduce(self) -> None:
        """Average the gradients over the workers, leave this worker's slice at ``shard``, and free the rest."""
        parts = [
            (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).flatten()
            for parameter in self._parameters
        ]
        gradient = torch.cat([*parts, self._whole.new_zeros(len(self._whole) - sum(map(len, parts)))])
        own = torch.empty_like(self.shard)
        dist.reduce_scatter_single(own, gradient)
        self._traffic.add(gradient)
        self.shard.grad = own / self._num_workers
        for parameter in self._parameters:
            parameter.grad = None
        self.release()

    def release(self) -> None:
        """Free the buffer until the next ``gather``."""
        self._whole.untyped_storage().resize_(0)


class DelegatedParameters:
    """All parameters of a module, replicated or sharded by size.

    Args:
        module: The module; its parameters must be the same on every worker.
        group_of: Parameter name -> name of the module whose buffer it shares.
        threshold: Elements from which a parameter is sharded; 0: all are.
    """

    def __init__(self, module: nn.Module, group_of: Callable[[str], str], threshold: int = THRESHOLD) -> None:
        named = dict(module.named_parameters())
        self.delegation: Delegation = delegate({name: value.numel() for name, value in named.items()}, threshold)
        self.traffic = Traffic()
        self._num_workers = dist.get_world_size()
        self._replicated = [named[name] for name in self.delegation.replicated]
        grouped: dict[str, list[nn.Parameter]] = {}
        for name in self.delegation.sharded:
            grouped.setdefault(group_of(name), []).append(named[name])
        rank = dist.get_rank()
        self._shards = [FlatShards(group, rank, self._num_workers, self.traffic) for group in grouped.values()]

    @property
    def trainable(self) -> list[nn.Parameter]:
        """What this worker's optimiser updates: its slices, and the replicated parameters."""
        return [*(group.shard for group in self._shards), *self._replicated]

    def gather(self) -> None:
        """Make all parameters usable: before a forward pass."""
        for group in self._shards:
            group.gather()

    def reduce(self) -> None:
        """Average all gradients over the workers, after a backward pass; sharded ones are gone until ``gather``."""
        for group in self._shards:
            group.reduce()
        if not self._replicated:
            return
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._replicated]
        bucket = torch.cat([part.flatten() for part in parts])
        dist.all_reduce(bucket)
        self.traffic.add(bucket)
        bucket /= self._num_workers
        sizes = [parameter.numel() for parameter in self._replicated]
        for parameter, gradient in zip(self._replicated, torch.split(bucket, sizes), strict=True):
            parameter.grad = gradient.view(parameter.shape)


def module_of(name: str) -> str:
    """Return the module of a ranker's parameter whose buffer it shares: a layer, an exit, a table, or the rest."""
    parts = name.split(".")
    if parts[0] == "tables":
        return name
    for container in ("layers", "exits"):
        if container in parts:
            return ".".join(parts[: parts.index(container) + 2])
    return ".".join(parts[:2])
