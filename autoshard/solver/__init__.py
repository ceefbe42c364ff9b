"""Solver: `Problem` in, `Solution` out; knows nothing of machine learning."""

from autoshard.solver.clocks import Clock as Clock
from autoshard.solver.clocks import processor_seconds as processor_seconds
from autoshard.solver.contest import read_contest as read_contest
from autoshard.solver.contest import write_contest as write_contest
from autoshard.solver.judge import Evaluation as Evaluation
from autoshard.solver.judge import evaluate as evaluate
from autoshard.solver.network import Link as Link
from autoshard.solver.network import Messages as Messages
from autoshard.solver.network import Network as Network
from autoshard.solver.network import Pruned as Pruned
from autoshard.solver.network import Term as Term
from autoshard.solver.problem import FORBIDDEN as FORBIDDEN
from autoshard.solver.problem import Problem as Problem
from autoshard.solver.problem_check import validate as validate
from autoshard.solver.search.pruning import prune as prune
from autoshard.solver.solution import Solution as Solution
from autoshard.solver.solution import Status as Status
from autoshard.solver.solve_problem import Progress as Progress
from autoshard.solver.solve_problem import Useful as Useful
from autoshard.solver.solve_problem import solve as solve
