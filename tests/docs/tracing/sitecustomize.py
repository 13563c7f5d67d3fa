"""Writes which functions a process calls, when FOLLOW_FOLDER is set and this folder is on
PYTHONPATH.

A line `seconds name` in a file per process, for each call of a function whose name is in
FOLLOW_NAMES: `module:qualified name`, without `<locals>`. Seconds are of the machine's monotonic
clock, so that the lines of several processes can be merged.
"""

import os
import sys
import threading
import time

FOLDER = os.environ.get("FOLLOW_FOLDER")
NAMES = frozenset(os.environ.get("FOLLOW_NAMES", "").split())
_QUALIFIED = frozenset(name.partition(":")[2] for name in NAMES)


def _follow(frame, event, arg):
    qualified = frame.f_code.co_qualname.replace(".<locals>", "")
    if event == "call" and qualified in _QUALIFIED:
        name = f"{frame.f_globals.get('__name__')}:{qualified}"
        if name in NAMES:
            with open(f"{FOLDER}/{os.getpid()}", "a") as file:
                file.write(f"{time.monotonic()} {name}\n")


if FOLDER:
    threading.setprofile(_follow)
    sys.setprofile(_follow)
