"""Makes benchmarks/attacked.py and the other tests' helpers importable."""

import pathlib
import sys

TESTS = pathlib.Path(__file__).parent.parent
sys.path[:0] = [str(TESTS), str(TESTS.parent / "benchmarks")]
