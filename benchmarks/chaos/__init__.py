"""The chaos lab: a real mesh, faults at seeded times, an open loop of requests, an oracle that judges each answer."""
