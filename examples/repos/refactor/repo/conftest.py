"""Puts the repository on the path of its tests."""
