"""`kt chat`: its command line, and one answer without an interactive chat"""
