"""Make file names and output UTF-8 whatever the locale says, as transcripts and ids are UTF-8, too."""

from __future__ import annotations

import os
import sys
from typing import TextIO


def use_utf8() -> None:
    """Make file names UTF-8 in this process and those it starts; call it once, first of all.

    Under another locale (Python treats C as UTF-8, unless PYTHONUTF8=0) file names would differ from those in
    transcripts, and some files could not be opened.  Python decides this at start-up, so it is started again,
    as the same process.  Standard output shows characters that it cannot encode as e.g. \\xfc.
    """
    if sys.getfilesystemencoding() != "utf-8":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    for stream in (sys.stdout, sys.stderr):
        _never_refuse(stream)


def _never_refuse(stream: TextIO | None) -> None:
    reconfigure = getattr(stream, "reconfigure", None)  # missing if the stream is None or a test's own
    if reconfigure is not None and stream is not None and stream.errors == "strict":
        reconfigure(errors="backslashreplace")
