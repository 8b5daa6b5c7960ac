"""Helpers of the benchmarks: contenders, timing, tables. The commands are in the folder above."""
