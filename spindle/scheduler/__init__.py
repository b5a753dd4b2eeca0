"""Order, fairness and packing. Knows lengths and bytes, and no torch."""

from spindle.scheduler.core import Scheduler, SchedulerConfig, Work
from spindle.scheduler.items import Block, Item, Kind

__all__ = ["Block", "Item", "Kind", "Scheduler", "SchedulerConfig", "Work"]
