"""The explorer: a page that composes the records of rehearsed units in the browser."""
