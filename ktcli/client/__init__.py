"""Asks servers that speak OpenAI's API: which models they have, and answers to conversations as they come"""
