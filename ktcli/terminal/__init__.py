"""A conversation on a terminal: prompt, slash commands, Markdown drawn as it comes"""
