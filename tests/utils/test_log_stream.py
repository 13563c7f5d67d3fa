"""Lines of the log that nobody reads are left out, and counted."""

import io
import logging
import os
import socket

import pytest

from vllm.utils.log_stream import LineHandler


def logger_to(stream) -> logging.Logger:
    logger = logging.Logger("test")  # one of its own: nothing else writes to `stream`
    logger.addHandler(LineHandler(stream))
    return logger


@pytest.mark.usefixtures("ends_soon")
def test_a_pipe_that_nobody_reads_stops_no_line():
    reads, writes = os.pipe()
    with open(reads, "rb") as reader, open(writes, "w") as stream:
        logger = logger_to(stream)
        for i in range(2000):
            logger.info("line %d %s", i, "x" * 100)
        os.set_blocking(reads, False)
        read = reader.read()
        written = read.decode().splitlines()
        assert written[0].startswith("line 0 ") and 100 < len(written) < 2000
        assert all(line.endswith("x" * 100) for line in written)

        logger.info("again")
        lost = 2000 - len(written)
        told, again = reader.read().decode().splitlines()
        assert told.endswith(f"lost, as nobody read the log: {lost}") and again == "again"


@pytest.mark.usefixtures("ends_soon")
def test_a_line_longer_than_a_pipe_is_cut():
    reads, writes = os.pipe()
    with open(reads, "rb") as reader, open(writes, "w") as stream:
        logger_to(stream).info("x" * 1_000_000)
        os.set_blocking(reads, False)
        assert reader.read().startswith(b"xxxx")


@pytest.mark.usefixtures("ends_soon")
def test_a_terminal_that_is_paused_stops_no_line():
    ours, theirs = os.openpty()
    with open(theirs, "w") as stream:
        logger = logger_to(stream)
        for _ in range(2000):
            logger.info("x" * 100)
        assert os.read(ours, 100).startswith(b"xxxx")
    os.close(ours)


@pytest.mark.usefixtures("ends_soon")
def test_a_socket_that_nobody_reads_stops_no_line():
    reads, writes = socket.socketpair()
    with reads, writes, writes.makefile("w") as stream:
        logger = logger_to(stream)
        for _ in range(10_000):
            logger.info("x" * 100)
        assert reads.recv(100) == b"x" * 100


def test_files_and_streams_in_memory_take_every_line(tmp_path):
    memory = io.StringIO()
    with (tmp_path / "log").open("w") as file:
        for stream in (memory, file):
            logger = logger_to(stream)
            for i in range(3000):
                logger.info("%d %s ü", i, "x" * 100)
    assert len(memory.getvalue().splitlines()) == 3000
    assert memory.getvalue() == (tmp_path / "log").read_text()
