"""HTML pages that commands write."""
