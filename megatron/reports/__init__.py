"""Reports as single HTML pages: one look for all of them, without network and without packages."""
