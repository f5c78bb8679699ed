"""What threads beside the training thread do first."""

from __future__ import annotations

import torch


def keep_to_one_thread() -> None:
    """Keep torch from computing what this thread asks for in further threads, which training needs.

    Threads started afterwards have one as well; those that there are keep theirs.
    """
    torch.set_num_threads(1)
