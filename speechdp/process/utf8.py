"""Names of files and what is printed are UTF-8, whatever the locale says: so are transcripts and ids."""

from __future__ import annotations

import os
import sys
from typing import TextIO


def use_utf8() -> None:
    """Have names of files be UTF-8 in this process and those it starts; to be called once, first of all.

    Under another locale (Python takes C for UTF-8, unless PYTHONUTF8=0) names of files would not be those in
    transcripts, and some could not be opened.  Python decides that when it starts: it is started anew, as the
    same process.  What standard output cannot show stands there as \\xfc.
    """
    if sys.getfilesystemencoding() != "utf-8":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    for stream in (sys.stdout, sys.stderr):
        _never_refuse(stream)


def _never_refuse(stream: TextIO | None) -> None:
    reconfigure = getattr(stream, "reconfigure", None)  # there is none where a test has put its own, or None
    if reconfigure is not None and stream is not None and stream.errors == "strict":
        reconfigure(errors="backslashreplace")
