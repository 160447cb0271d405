"""The API of Ollama: chat and generate, and what clients ask about models before."""
