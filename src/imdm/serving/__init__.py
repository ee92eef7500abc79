"""Serving: an engine with continuous batching (`engine.py`, which needs only the package itself); an HTTP service
around it, and a page, which need the extra `imdm[serve]`.

Nothing is imported here, so that the limits (`settings.py`) are options of the command without waiting for torch.
"""
