"""Views of a run for people: episode records, the trajectory page, films, plots and the terminal display."""
