"""Report on the machine and the installed packages."""
