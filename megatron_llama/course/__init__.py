"""The course of docs/course: one exercise for each of its eight lessons, and the check of an answer to it."""
