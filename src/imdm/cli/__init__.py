"""The command line. Each module registers its commands when it is imported."""

from imdm.cli import costing, making, measuring, porting, serving, writing  # noqa: F401
from imdm.cli.app import main

__all__ = ["main"]
