"""Brute force: slow, obvious versions of what the package does, to compare with."""
