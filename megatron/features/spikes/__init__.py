"""Spikes of the loss and numbers that are not finite: log, skip the update, roll back, or stop."""
