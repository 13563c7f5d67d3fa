"""What tests run in child processes."""

import ctypes
import os
import subprocess
import sys
import time

from vllm.platforms.child import requests


def add(a, b):
    print("what is printed is no answer")
    return a + b


def read_stdin():
    return sys.stdin.read()


def fault():
    ctypes.string_at(0)


def fail(text):
    raise ValueError(text)


def hang():
    time.sleep(1000)


def hang_with_another(marker):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", marker])
    time.sleep(1000)


def allocate(num_bytes):
    return len(bytearray(num_bytes))


def echo(channel, before):
    for message in requests(channel):
        if message == "exit":
            os.write(2, b"last words\n")
            os._exit(7)
        channel.send((before, message, os.getpid()))


def serve_and_allocate(channel):
    for num_bytes in requests(channel):
        try:
            channel.send(allocate(num_bytes))
        except MemoryError:
            channel.send("no memory")
