"""Sources: whatever a user brings becomes one `Program`."""

from autoshard.program._artifact import load_artifact as load_artifact
from autoshard.program._decoder import SAVABLE as SAVABLE
from autoshard.program._decoder import SAVED as SAVED
from autoshard.program._decoder import DecoderDims as DecoderDims
from autoshard.program._decoder import decoder_program as decoder_program
from autoshard.program._kernels import KernelBlocks as KernelBlocks
from autoshard.program._kernels import flash_attention as flash_attention
from autoshard.program._lean import import_lean as import_lean
from autoshard.program._load import load_program as load_program
from autoshard.program._load import load_rules as load_rules
from autoshard.program._load import open_source as open_source
from autoshard.program._modules import Functional as Functional
from autoshard.program._modules import arrays_of as arrays_of
from autoshard.program._modules import functional as functional
from autoshard.program._opaque import OpaqueCall as OpaqueCall
from autoshard.program._opaque import lower_on_shards as lower_on_shards
from autoshard.program._opaque import lower_traced as lower_traced
from autoshard.program._program import Argument as Argument
from autoshard.program._program import Program as Program
from autoshard.program._program import Result as Result
from autoshard.program._program import Role as Role
from autoshard.program._register import register_rule as register_rule
from autoshard.program._remat import parse_remat as parse_remat
from autoshard.program._torch import from_torch as from_torch
from autoshard.program._trace import trace as trace
