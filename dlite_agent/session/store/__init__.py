"""Stores of sessions: memory, disk and Redis behind one Protocol."""
