"""The front door: admission, deadline, tier, the calls of one request, and the HTTP API."""
