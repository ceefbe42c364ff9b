"""Choosing: `Problem` in, `Solution` out. Knows nothing of machine learning."""

from ._clock import Clock as Clock
from ._clock import processor_seconds as processor_seconds
from ._contest import read_contest as read_contest
from ._contest import write_contest as write_contest
from ._evaluate import Evaluation as Evaluation
from ._evaluate import evaluate as evaluate
from ._narrow import narrow as narrow
from ._network import Link as Link
from ._network import Messages as Messages
from ._network import Narrowed as Narrowed
from ._network import Network as Network
from ._network import Term as Term
from ._problem import FORBIDDEN as FORBIDDEN
from ._problem import Problem as Problem
from ._solution import Solution as Solution
from ._solution import Status as Status
from ._solve import Progress as Progress
from ._solve import solve as solve
from ._validate import validate as validate
