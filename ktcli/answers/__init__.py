"""From ids to events: turns the ids of an answer into text, thoughts and tool calls."""
