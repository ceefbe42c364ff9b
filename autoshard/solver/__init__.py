"""Choosing: `Problem` in, `Solution` out. Knows nothing of machine learning."""

from autoshard.solver._clock import Clock as Clock
from autoshard.solver._clock import processor_seconds as processor_seconds
from autoshard.solver._contest import read_contest as read_contest
from autoshard.solver._contest import write_contest as write_contest
from autoshard.solver._evaluate import Evaluation as Evaluation
from autoshard.solver._evaluate import evaluate as evaluate
from autoshard.solver._narrow import narrow as narrow
from autoshard.solver._network import Link as Link
from autoshard.solver._network import Messages as Messages
from autoshard.solver._network import Narrowed as Narrowed
from autoshard.solver._network import Network as Network
from autoshard.solver._network import Term as Term
from autoshard.solver._problem import FORBIDDEN as FORBIDDEN
from autoshard.solver._problem import Problem as Problem
from autoshard.solver._solution import Solution as Solution
from autoshard.solver._solution import Status as Status
from autoshard.solver._solve import Progress as Progress
from autoshard.solver._solve import solve as solve
from autoshard.solver._validate import validate as validate
