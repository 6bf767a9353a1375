"""The sharding planner: which table lies how on which card, and what that costs, on paper.

Pure Python: ``config`` is what a person writes down, ``cost`` what a placement costs a card, ``search`` the choice,
``report`` the figures with their arithmetic, ``picture`` the drawing. ``calibrate`` alone, which measures this machine
for the cost model, reads tables.
"""

from models.embedding.planner.config import CardConfig, PlanConfig, PlanTable
from models.embedding.planner.search import Plan, make_plan

__all__ = ["CardConfig", "Plan", "PlanConfig", "PlanTable", "make_plan"]
