"""A conversation on a terminal: prompt, slash commands, Markdown rendered as it arrives."""
