import os
import sys
from pathlib import Path


os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parent))  # the helper modules in the tests' folder
