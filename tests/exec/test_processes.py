"""Two processes with four CPU devices each run one plan."""

from pathlib import Path

from tests.exec import planned_programs as made
from tests.exec.planned_programs import handmade
from tests.exec.workers import run_workers


WORKER = """
import json, os, sys
process, port, plan_file = int(sys.argv[1]), sys.argv[2], sys.argv[3]
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)
from autoshard.exec import measure, measurement_figures
from autoshard.planning import load_plan
from tests.exec import planned_programs as made
program, plan = made.mlp(), load_plan(plan_file)
found = measurement_figures(measure(program, plan, steps=2, check=True, timed_collectives=2))
step = plan.jit(program.fn)
params, loss = step(*program.make_args(0))
local = sum(shard.data.size for shard in params["up"].addressable_shards)
print(json.dumps({"figures": found, "devices": len(jax.devices()), "local": local}))
"""


def test_two_processes_agree_with_the_unplanned_program(tmp_path: Path):
    program = made.mlp()
    specs = {"params.up": "-,model", "params.down": "model,-", "arg1": "data,-", "arg2": "data,-"}
    handmade(program, {"data": 4, "model": 2}, specs).save(tmp_path / "plan.json")
    for found in run_workers(WORKER, [str(tmp_path / "plan.json")]):
        assert found["devices"] == 8
        assert found["figures"]["passed"] and found["figures"]["max_rel_diff"] < 1e-5
        assert found["figures"]["collectives"]["wire_bytes"]["data"]["compiled"] > 0
        assert found["local"] == 4 * 32 * 32
        times = {tuple(t["axes"]): t for t in found["figures"]["collectives"]["times"]}
        assert {("data",), ("model",)} <= set(times), "each process sees the collectives of its own devices"
        assert all(t["seconds"] > 0 and t["count"] >= 1 for t in times.values())
