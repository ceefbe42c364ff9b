"""What a program does: ops, tensors, loops, sharding rules. Knows no meshes and no chips."""

from autoshard.graph._clusters import Cluster as Cluster
from autoshard.graph._clusters import Edge as Edge
from autoshard.graph._clusters import Structure as Structure
from autoshard.graph._clusters import build_structure as build_structure
from autoshard.graph._fusion import Fusion as Fusion
from autoshard.graph._fusion import Liveness as Liveness
from autoshard.graph._fusion import analyse as analyse
from autoshard.graph._manual import COLLECTIVES as COLLECTIVES
from autoshard.graph._manual import IN as IN
from autoshard.graph._manual import OUT as OUT
from autoshard.graph._read import read_graph as read_graph
from autoshard.graph._read import replace_names as replace_names
from autoshard.graph._records import AxisUse as AxisUse
from autoshard.graph._records import Carry as Carry
from autoshard.graph._records import Constraint as Constraint
from autoshard.graph._records import FactorKind as FactorKind
from autoshard.graph._records import Loop as Loop
from autoshard.graph._records import Manual as Manual
from autoshard.graph._records import Op as Op
from autoshard.graph._records import Opaque as Opaque
from autoshard.graph._records import OpClass as OpClass
from autoshard.graph._records import OpGraph as OpGraph
from autoshard.graph._records import Rule as Rule
from autoshard.graph._records import Sharding as Sharding
from autoshard.graph._records import Tensor as Tensor
from autoshard.graph._rotate import ROTATE as ROTATE
