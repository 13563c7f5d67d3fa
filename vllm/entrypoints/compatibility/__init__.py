"""What this engine makes of the names that upstream's vLLM has: flags of `vllm serve`, environment
variables, fields of requests, endpoints, library names and metrics.

The names are data, one JSON file for each sort. A row has one of three kinds:

obeyed: it means here what it means upstream. no effect: it is accepted, and `why` says why it
changes nothing here. refused: it would change an answer and is not supported; `use` says what to
use instead.
"""
