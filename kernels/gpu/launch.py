"""Launching: how many persistent programs a device takes."""

from __future__ import annotations

import torch

_INTERPRETED_PROGRAMS = 3


def num_programs(device: torch.device) -> int:
    """Return one program a multiprocessor; a few where kernels are interpreted, so that each walks several tiles."""
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count
