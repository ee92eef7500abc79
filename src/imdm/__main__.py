"""`imdm` and `python -m imdm`: signals are caught before anything heavy is loaded."""

from __future__ import annotations

from imdm.stopping import catch_signals, ignore_signals


def main() -> None:
    catch_signals()
    from imdm.cli import main as run

    try:
        run()
    finally:
        ignore_signals()


if __name__ == "__main__":
    main()
