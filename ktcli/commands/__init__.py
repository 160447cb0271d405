"""One file per verb or family of verbs: parse arguments, call one function, render its result."""
