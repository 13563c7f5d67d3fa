"""Kernels that libraries compile on the machine they run on: where they are kept, how they are made
ready before the first request, and what says that one was compiled after that."""
