"""What a person looks at: episode records, the trajectory page, films, plots and the terminal display."""
