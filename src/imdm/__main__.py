"""`imdm` and `python -m imdm`: signals are caught before anything heavy is loaded."""

from __future__ import annotations

import sys

from imdm.core.stopping import catch_signals, end, has_threads, ignore_signals


def main() -> None:
    """Run the command and end the process, without finalising Python unless a profiler or debugger looks on."""
    catch_signals()
    from imdm.cli import main as run

    try:
        run()
    except SystemExit as stop:
        ignore_signals()
        if "imdm.core.devices" in sys.modules:  # else it never was one of several processes
            from imdm.core.devices import leave

            leave(stop.code)
        watched = sys.gettrace() is not None or sys.getprofile() is not None
        if "torch" in sys.modules and not watched and not has_threads():
            end(stop.code)
        raise
    finally:
        ignore_signals()


if __name__ == "__main__":
    main()
