"""Where the benchmarks find the repository's modules; imported before any of them.

A script started from any folder, by python or by torchrun, finds what lies beside it and no more.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
