"""Stands in for apex."""
