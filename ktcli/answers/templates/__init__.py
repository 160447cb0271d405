"""Response templates: how a checkpoint itself defines the parsing of its answers (`response_template`)."""
