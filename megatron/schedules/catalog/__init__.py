"""The schedules: functions that yield the actions of a stage in order, each with its :class:`ScheduleSpec`."""
