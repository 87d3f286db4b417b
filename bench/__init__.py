"""Measurements against other libraries, all peers in one process and interleaved; ``python -m bench``."""
