"""The command line itself: the table of commands, options that several have, and help"""
