"""What every thread beside the training thread does first."""

from __future__ import annotations

import torch


def keep_to_one_thread() -> None:
    """Limit torch to one computing thread for work that this thread asks for: training needs the other cores.

    Threads started afterwards are limited as well; existing threads are not.
    """
    torch.set_num_threads(1)
