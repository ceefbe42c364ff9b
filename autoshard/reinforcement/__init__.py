"""Plans of reinforcement learning: a sampler and a trainer on the same chips, or each on its own."""

from autoshard.reinforcement.answer_schedule import AnswerSchedule as AnswerSchedule
from autoshard.reinforcement.answer_schedule import answer_lengths as answer_lengths
from autoshard.reinforcement.answer_schedule import schedule_answers as schedule_answers
from autoshard.reinforcement.answer_schedule import steady_level as steady_level
from autoshard.reinforcement.chip_shares import ChipPart as ChipPart
from autoshard.reinforcement.chip_shares import share_chips as share_chips
from autoshard.reinforcement.chip_shares import whole_part as whole_part
from autoshard.reinforcement.rl_plan import MODES as MODES
from autoshard.reinforcement.rl_plan import RlPlan as RlPlan
from autoshard.reinforcement.rl_plan import RlWay as RlWay
from autoshard.reinforcement.rl_plan import plan_rl as plan_rl
from autoshard.reinforcement.rl_tables import rl_commands as rl_commands
from autoshard.reinforcement.rl_tables import rl_figures as rl_figures
from autoshard.reinforcement.rl_tables import rl_report as rl_report
from autoshard.reinforcement.rl_workload import RlModel as RlModel
from autoshard.reinforcement.rl_workload import RlWorkload as RlWorkload
from autoshard.reinforcement.rl_workload import rl_model as rl_model
from autoshard.reinforcement.sampler import Sampler as Sampler
from autoshard.reinforcement.sampler import samplers as samplers
from autoshard.reinforcement.trainer import Trainer as Trainer
from autoshard.reinforcement.trainer import TrainerStage as TrainerStage
from autoshard.reinforcement.trainer import best_trainer as best_trainer
from autoshard.reinforcement.trainer import eager_stages as eager_stages
from autoshard.reinforcement.weight_move import predict_move as predict_move
