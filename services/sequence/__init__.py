"""The request-only path: user log to UserState."""
