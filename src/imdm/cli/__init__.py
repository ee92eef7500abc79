"""The command line. Each module registers its commands when it is imported."""

from imdm.cli import costing, making, measuring, serving, writing  # noqa: F401
from imdm.cli.app import main

__all__ = ["main"]
