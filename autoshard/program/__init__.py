"""Sources: whatever a user brings becomes one `Program`."""

from autoshard.program._artifact import load_artifact as load_artifact
from autoshard.program._load import load_program as load_program
from autoshard.program._load import open_source as open_source
from autoshard.program._program import Argument as Argument
from autoshard.program._program import Program as Program
from autoshard.program._program import Result as Result
from autoshard.program._program import Role as Role
from autoshard.program._torch import from_torch as from_torch
from autoshard.program._trace import trace as trace
