import os
import sys
from pathlib import Path


os.environ.setdefault("JAX_PLATFORMS", "cpu")
# These tests compile many small programs once each: quick compilation matters more than quick programs.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
sys.path.insert(0, str(Path(__file__).parent))  # the helper modules beside the tests
