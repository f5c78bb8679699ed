"""A command of ours over ranks, each of which begins to write a file and never finishes it.

A rank that is ended goes on to its end when both have removed their files: the first to end has mpirun kill
the other, which may get no core before.

python tests/helpers/rank_programs/writing.py FOLDER decode RUN DATA
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import NoReturn

from speechdp.__main__ import main
from speechdp.files import atomic_path


def write_for_ever(*_arguments: object, **_options: object) -> NoReturn:
    """Begin a file in FOLDER and stay at it until a signal ends this rank."""
    try:
        with atomic_path(folder / f"of-rank-{os.environ['OMPI_COMM_WORLD_RANK']}") as path:
            path.write_text("begun", encoding="utf-8")
            while True:
                time.sleep(0.05)
    finally:
        while any(folder.iterdir()):
            time.sleep(0.01)


if __name__ == "__main__":
    import speechdp.decode.split

    folder = Path(sys.argv.pop(1))
    speechdp.decode.split.recogniser_for = write_for_ever
    main()
