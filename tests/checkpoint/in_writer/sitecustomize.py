"""Python runs this before anything else in a process whose path has this directory."""

from tests.checkpoint.file_faults import WriterStruck

WriterStruck.heed()
