"""The fit of the planner's constants to published runs, and its errors: ``python -m benchmarks.published``."""
