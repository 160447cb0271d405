"""From ids to events: what the ids of an answer say, whether text, thoughts or calls of tools"""
