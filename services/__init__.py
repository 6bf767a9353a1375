"""The six stations of a request, one folder a deployment.

Each holds ``config.py`` and ``service.py``: a plain async class that knows nothing of Ray. The folders never import
one another; they speak through ``shared.schema`` and ``shared.handle``. ``worker`` and ``meter`` are the two things
that every replica needs.
"""
