"""``python -m torch_dataloader_utils`` is the command ``tdu``."""

from torch_dataloader_utils.cli.main import main

if __name__ == "__main__":
    main()
