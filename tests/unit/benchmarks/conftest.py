"""Makes the files of benchmarks/ importable, as they are for each other."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
