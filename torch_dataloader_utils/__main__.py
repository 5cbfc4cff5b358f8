"""``python -m torch_dataloader_utils`` is the command ``tdu``."""

from __future__ import annotations

import signal


def main() -> None:
    """Run ``tdu``. While its modules are imported, Ctrl-C ends the process at once, without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as in the background
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from torch_dataloader_utils.cli.main import main as run  # noqa: PLC0415

    run()


if __name__ == "__main__":
    main()
