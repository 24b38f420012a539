"""Monitoring: the statistics of a model's solves over training, and alarms."""

from torchdeq.monitoring.alarms import Alarm, AlarmKind
from torchdeq.monitoring.records import Record
from torchdeq.monitoring.watching import Watch, watch

__all__ = ["Alarm", "AlarmKind", "Record", "Watch", "watch"]
