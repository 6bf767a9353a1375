"""Numpy arrays as tensors, without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ROWS_MULTIPLE = 8
"""Candidates and events are padded to a multiple of this, so that the bits of one do not depend on how many there are.

MKL sums the last few rows of a product in another order (measured: all of 1 to 3 rows, the odd row of 33); with row
counts that are multiples of 4 no row differed between any two counts from 1 to 1,000.
"""


class _Alias:
    """The memory of an array, declared writable; keeps the array alive."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self.array = array


def tensor_view(array: npt.NDArray[Any]) -> Tensor:
    """Wrap an array as a tensor that shares its memory.

    Arrays that come out of the object store or a mapped weights file are read-only, which ``torch.from_numpy`` warns
    about, because a tensor cannot be. Such a tensor must only be read: writing to it may end the process.

    Args:
        array: Any array that torch has a type for; copied only if its strides are negative.
    """
    if any(stride < 0 for stride in array.strides):
        array = array.copy()
    if not array.flags.writeable:
        array = np.asarray(_Alias(array))
    return torch.from_numpy(array)
