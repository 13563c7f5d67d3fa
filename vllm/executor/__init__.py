"""Where the ranks of an engine run: in its process, in others, on other machines."""
