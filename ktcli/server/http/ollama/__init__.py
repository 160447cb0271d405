"""The API of Ollama: chat and generate, and the requests about models that clients send first."""
