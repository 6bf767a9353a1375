"""What every user did, kept once, in order: the log that serving reads and events are appended to.

``UserLog`` is what a service is given; ``RedisUserLog`` the real one, ``BufferedUserLog`` around it keeps events while
the store is down, ``MemoryUserLog`` says in plain Python what both must do. ``EmbeddedStore`` runs a server where none
is given.
"""

from shared.userlog.api import AppendResult, HistoryQuery, UserLoad, UserLog
from shared.userlog.buffered import BufferConfig, BufferedUserLog
from shared.userlog.client import StoreConfig, connect
from shared.userlog.embedded import EmbeddedStore, EmbeddedStoreConfig
from shared.userlog.memory import MemoryUserLog
from shared.userlog.redis_log import RedisUserLog, UserLogConfig

__all__ = [
    "AppendResult",
    "BufferConfig",
    "BufferedUserLog",
    "EmbeddedStore",
    "EmbeddedStoreConfig",
    "HistoryQuery",
    "MemoryUserLog",
    "RedisUserLog",
    "StoreConfig",
    "UserLoad",
    "UserLog",
    "UserLogConfig",
    "connect",
]
