"""What every report is made with: formats of numbers, tables, plots, pages."""

import logging

# While it is imported, Matplotlib tells on standard error of a home where its cache cannot be written, and
# goes on without: beside our own message of such a disk that looks like a second fault.
logging.getLogger("matplotlib").setLevel(logging.ERROR)
