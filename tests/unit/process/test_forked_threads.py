"""Forks of a process that has computed: ranks that are threads may all begin to compute at once."""

from __future__ import annotations

import subprocess
import sys

#: Forks, in each of which four threads compute at the same time as their first; prints how many have failed.
_PROGRAM = """
import os, threading, torch
from tests.helpers.fork_server import do_and_exit

torch.set_num_threads(torch.get_num_threads())  # as a training does: the pool is there

def work():
    barrier, failed = threading.Barrier(4), []

    def compute():
        barrier.wait()
        try:
            torch.eye(8)
        except RuntimeError as error:
            failed.append(error)

    threads = [threading.Thread(target=compute) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(failed)

bad = 0
for _ in range(60):
    pid = os.fork()
    if not pid:
        do_and_exit(work)
    bad += os.waitpid(pid, 0)[1] != 0
print("failed:", bad)
"""


def test_threads_of_a_fork_find_torchs_pool() -> None:
    """Without `renew_torch` about half of such forks have failed."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=500, check=True
    )
    assert done.stdout.splitlines()[-1] == "failed: 0", done.stdout + done.stderr
