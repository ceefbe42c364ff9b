"""Applying plans, running, compiling ahead of time, measuring."""

from autoshard.exec._apply import Application as Application
from autoshard.exec._apply import PlannedFunction as PlannedFunction
from autoshard.exec._devices import ensure_devices as ensure_devices
from autoshard.exec._devices import jax_mesh as jax_mesh
from autoshard.exec._devices import plan_devices as plan_devices
from autoshard.plan._plan import set_executor


set_executor(Application)
