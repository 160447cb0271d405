"""The text files of a model: tokenizer, chat template and settings, read as data; no engine is needed"""
