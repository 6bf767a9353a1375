"""The columnar wire format of rank requests: a candidate's features as columns, not as maps. docs/wire-format.md.

A client needs numpy and this package (``shared.wire.client``); the ingress takes the same bytes beside JSON and
msgpack, turns those into the same columns, and hands the block on to preprocess as it came.
"""

from shared.wire.block import BatchLimits, decode_batch, encode_batch
from shared.wire.columns import CandidateBatch, Column, IdLists, Numbers, columns_of
from shared.wire.message import MEDIA_TYPE, encode_request, split_request

__all__ = [
    "MEDIA_TYPE",
    "BatchLimits",
    "CandidateBatch",
    "Column",
    "IdLists",
    "Numbers",
    "columns_of",
    "decode_batch",
    "encode_batch",
    "encode_request",
    "split_request",
]
